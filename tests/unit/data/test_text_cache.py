"""The cache of prepared texts: damage, disks without locks, folders that are closed to us."""

from __future__ import annotations

import errno
import fcntl
import gzip
import os
import shutil
import stat
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import common.shared_files
import data.prepare
from data.errors import DataError, TextLost
from data.prepared import Damaged, read_info
from texts import TEXT, prepare, text_of, written


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr("data.progress.FIRST_SECONDS", 600)  # a busy disk says nothing more


@pytest.fixture
def source(tmp_path):
    return written(tmp_path / "a.txt", TEXT)


def folders(cache):
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def overwrite(path, at, content):
    with open(path, "r+b") as opened:
        opened.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        opened.write(content)


DAMAGE = {
    "no corpus.json": lambda folder: (folder / "corpus.json").unlink(),
    "corpus.json is {}": lambda folder: (folder / "corpus.json").write_text("{}"),
    "corpus.json is a list": lambda folder: (folder / "corpus.json").write_text("[1]"),
    "corpus.json nests deeply": lambda folder: (folder / "corpus.json").write_text("[" * 10**5),
    "another split": lambda folder: overwrite(folder / "corpus.json", 300, b"9"),
    "tokens cut short": lambda folder: os.truncate(folder / "tokens.bin", 5000),
    "one token overwritten": lambda folder: overwrite(folder / "tokens.bin", -3000, b"\x07"),
    "tokens are a folder": lambda folder: (
        (folder / "tokens.bin").unlink(),
        (folder / "tokens.bin").mkdir(),
    ),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "another tokenizer": lambda folder: overwrite(folder / "tokenizer.json", -60, b"w"),
    "a file in place of the folder": lambda folder: (
        shutil.rmtree(folder),
        folder.write_text("not a folder"),
    ),
    "an empty folder": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_prepared_text_is_said_and_prepared_anew(source, tmp_path, damage):
    cache = tmp_path / "cache"
    fingerprint = prepare(source, cache).info.fingerprint
    (name,) = folders(cache)
    DAMAGE[damage](cache / name)
    lines = []

    corpus = prepare(source, cache, say=lines.append)

    assert text_of(corpus) == TEXT
    assert corpus.info.fingerprint == fingerprint
    assert folders(cache) == [name]  # nothing of the damaged one is left
    assert len(lines) == 1
    assert lines[0].startswith(f"warning: the prepared text in {cache / name} is damaged: ")

    prepare(source, cache, say=lines.append)
    assert len(lines) == 1


@pytest.mark.parametrize("name", ["tokens.bin", "corpus.json"])
def test_any_byte_that_changes_is_noticed(source, tmp_path, name):
    prepare(source, tmp_path / "cache")
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    whole = (folder / name).read_bytes()
    for place in [*range(0, len(whole), 29), *range(len(whole) - 60, len(whole) - 1)]:
        overwrite(folder / name, place, bytes([whole[place] ^ 0x81]))
        with pytest.raises(Damaged):
            read_info(folder, verify=True)
        overwrite(folder / name, place, whole[place : place + 1])
    read_info(folder, verify=True)


def test_the_other_processes_of_a_machine_do_not_read_it_all(source, tmp_path):
    cache = tmp_path / "cache"
    prepare(source, cache)
    (name,) = folders(cache)
    overwrite(cache / name / "tokens.bin", -3000, b"\x07")

    assert text_of(prepare(source, cache, verify=False)) != TEXT  # the first has verified it


def test_the_fingerprint_of_a_text_is_what_it_always_was(source, tmp_path):
    """Snapshots refer to it: with another one each would be refused as of another text."""
    fingerprint = prepare(source, tmp_path / "cache").info.fingerprint

    assert fingerprint == "d45959dba989d50f0e2d0fb38976282f0d53c6157ccfa0e10b83878460f5e4bf"


def test_a_corpus_has_the_name_that_it_is_asked_for_by(source, tmp_path):
    other = tmp_path / "private-name.txt"
    other.write_bytes(source.read_bytes())
    prepare(other, tmp_path / "cache")
    other.replace(source)
    corpus = prepare(source, tmp_path / "cache")

    assert corpus.info.name == str(source)
    assert len(folders(tmp_path / "cache")) == 1  # of one text


@pytest.mark.parametrize("ending", ["gz", "bz2", "xz"])
def test_a_prepared_plain_text_called_compressed_is_refused(source, tmp_path, ending):
    prepare(source, tmp_path / "cache")
    packed = tmp_path / f"a.txt.{ending}"
    packed.write_bytes(source.read_bytes())

    with pytest.raises(DataError, match=rf"a\.txt\.{ending} cannot be read"):
        prepare(packed, tmp_path / "cache")


def test_a_prepared_compressed_text_called_plain_is_refused(source, tmp_path):
    packed = tmp_path / "a.txt.gz"
    packed.write_bytes(gzip.compress(TEXT.encode()))
    prepare(packed, tmp_path / "cache")
    source.write_bytes(packed.read_bytes())

    with pytest.raises(DataError, match="not UTF-8 text, but compressed by gzip"):
        prepare(source, tmp_path / "cache")


def test_a_text_that_is_cut_short_while_it_is_read_ends_the_read(source, tmp_path):
    corpus = prepare(source, tmp_path / "cache")
    (tokens,) = (tmp_path / "cache").glob("*/tokens.bin")
    os.truncate(tokens, 4000)

    with pytest.raises(TextLost, match="The next start prepares it again"):
        text_of(corpus)
    assert text_of(prepare(source, tmp_path / "cache")) == TEXT


# Disks without locks.


@pytest.fixture(params=[errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK], ids=errno.errorcode.get)
def no_locks(request, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)


def test_a_text_is_prepared_on_a_disk_without_locks(no_locks, source, tmp_path):
    assert text_of(prepare(source, tmp_path / "cache")) == TEXT
    assert len(folders(tmp_path / "cache")) == 1


def test_without_locks_the_first_of_two_is_used_by_both(no_locks, source, tmp_path, monkeypatch):
    cache, both = tmp_path / "cache", threading.Barrier(2, timeout=60)
    build, results = data.prepare.build, []

    def together(*arguments):
        both.wait()  # neither has found a prepared text
        build(*arguments)
        both.wait()

    monkeypatch.setattr(data.prepare, "build", together)
    threads = [
        threading.Thread(target=lambda: results.append(prepare(source, cache))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [text_of(corpus) for corpus in results] == [TEXT, TEXT]
    assert len(folders(cache)) == 1


def test_a_killed_preparation_blocks_nobody_without_locks(no_locks, source, tmp_path, monkeypatch):
    cache = tmp_path / "cache"

    class Killed(BaseException):
        pass

    def build(*arguments):
        (arguments[-1] / "tokens.bin").write_bytes(b"half")
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(data.prepare, "build", build)
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)  # a killed process tidies nothing
        with pytest.raises(Killed):
            prepare(source, cache)
    (left,) = folders(cache)

    assert text_of(prepare(source, cache)) == TEXT  # at once

    # It could be another machine's that is still at work; a day later nobody is.
    assert left in folders(cache)
    old = time.time() - common.shared_files.ABANDONED_SECONDS - 60
    os.utime(cache / left, (old, old))
    prepare(source, cache)
    assert len(folders(cache)) == 1
    assert left not in folders(cache)


def test_what_another_machine_is_writing_is_left_alone(source, tmp_path):
    """A lock can be one machine's only, as on disks that are mounted with local locks."""
    cache = tmp_path / "cache"
    prepare(source, cache)
    (name,) = folders(cache)
    theirs, mine = (
        f".{name}.elsewhere.0123.tmp",
        common.shared_files.temporary_name(cache / name).name,
    )
    (cache / theirs).mkdir()
    (cache / mine).mkdir()
    shutil.rmtree(cache / name)

    prepare(source, cache)

    assert folders(cache) == sorted([theirs, name])


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "Free some space"),
        (errno.EDQUOT, "Free some space"),
        (errno.EIO, "Name another folder"),
        (errno.EROFS, "Name another folder"),
        (errno.EACCES, "Name another folder"),
    ],
    ids=lambda value: errno.errorcode.get(value),
)
def test_only_a_full_disk_is_told_to_make_room(source, tmp_path, monkeypatch, number, remedy):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("data.tokenizer.CharTokenizer.save", refuse)

    with pytest.raises(DataError, match=rf"data\.cache_dir=.*{os.strerror(number)}") as caught:
        prepare(source, tmp_path / "cache")
    assert remedy in str(caught.value)
    assert ("Free some space" in str(caught.value)) == (remedy == "Free some space")


# Folders and files that are closed to us.


@pytest.fixture
def open_folder():
    """A folder into which everybody may go: pytest's own are their user's."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@contextmanager
def as_nobody():
    """Without root's rights, from which nothing is closed."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def closed(path, mode):
    path.chmod(mode)
    return path


def text_in(path):
    path.parent.mkdir(exist_ok=True)
    return written(path, TEXT)


def test_sources_that_may_not_be_read_are_told(open_folder):
    closed(text_in(open_folder / "file.txt"), 0)
    text_in(open_folder / "no-search" / "a.txt")
    closed(open_folder / "no-search", 0o600 if os.geteuid() else 0)
    text_in(open_folder / "no-list" / "a.txt")
    closed(open_folder / "no-list", 0o311)
    cases = ["file.txt", "*.txt", "no-search/a.txt", "no-search/*.txt", "no-list/*.txt"]

    with as_nobody():
        for case in cases:
            with pytest.raises(DataError, match="Permission denied") as caught:
                prepare(open_folder / case, open_folder / "cache")
            assert str(caught.value).startswith(f"data.source={open_folder / case}")
    for folder in ("no-search", "no-list"):
        closed(open_folder / folder, 0o700)


@pytest.mark.parametrize("is_url", [False, True])
def test_caches_that_may_not_be_used_are_told(open_folder, is_url):
    source = "http://127.0.0.1:1/a.txt" if is_url else text_in(open_folder / "a.txt")
    caches = {"read-only": 0o555, "closed": 0, "no-search": 0o644}
    for name, mode in caches.items():
        (open_folder / name).mkdir()
        closed(open_folder / name, mode)

    with as_nobody():
        for name in [*caches, "closed/inside", "read-only/inside"]:
            with pytest.raises(DataError, match="Permission denied") as caught:
                prepare(source, open_folder / name)
            assert str(caught.value).startswith(f"data.cache_dir={open_folder / name} cannot be")
            assert "Free some space" not in str(caught.value)
    for name in caches:
        closed(open_folder / name, 0o700)


def test_a_prepared_text_of_another_user_is_used_or_told(open_folder):
    source, cache = text_in(open_folder / "a.txt"), open_folder / "cache"
    prepare(source, cache)
    (name,) = folders(cache)
    assert stat.S_IMODE((cache / name).stat().st_mode) & 0o055 == 0o055  # for all, as umask says

    with as_nobody():
        assert text_of(prepare(source, cache)) == TEXT
    for file, mode in (("corpus.json", 0), ("tokens.bin", 0), (".", 0)):
        before = (cache / name / file).stat().st_mode
        closed(cache / name / file, mode)
        with as_nobody(), pytest.raises(DataError, match=r"data\.cache_dir=.*Permission denied"):
            prepare(source, cache)
        closed(cache / name / file, stat.S_IMODE(before))

    (cache / name / "corpus.json").write_text("{}")  # damaged, and not to be mended
    closed(cache, 0o555)
    with as_nobody(), pytest.raises(DataError, match=r"data\.cache_dir=.*Permission denied"):
        prepare(source, cache)
    closed(cache, 0o755)


@pytest.mark.parametrize(
    ("cache", "reason"),
    [("~nobody-has-this-name/x", "home"), ("x" * 300, "too long"), ("a.txt/inside", "directory")],
)
def test_a_cache_folder_that_cannot_be_is_told(source, tmp_path, monkeypatch, cache, reason):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(DataError, match=r"data\.cache_dir=") as caught:
        prepare(source, cache)
    assert reason in str(caught.value)


def test_a_cache_folder_of_the_home_is_in_the_home(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    prepare(source, "~/texts")

    assert folders(tmp_path / "home/texts")
    assert not (tmp_path / "~").exists()
