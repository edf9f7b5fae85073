"""The cache of prepared texts: damage, disks without locks, folders that are closed to us."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

import data.prepare
from data.errors import DataError, TextLost
from data.prepared import Damaged, verify_hashes
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
    "no hashes": lambda folder: (folder / "sha256.json").unlink(),
    "the hash of nothing": lambda folder: (folder / "sha256.json").write_text("{}"),
    "another hash": lambda folder: overwrite(folder / "sha256.json", 30, b"9"),
    "tokens cut short": lambda folder: os.truncate(folder / "tokens.bin", 5000),
    "one token overwritten": lambda folder: overwrite(folder / "tokens.bin", -3000, b"\x07"),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "another tokenizer": lambda folder: overwrite(folder / "tokenizer.json", -60, b"w"),
    "a file in place of the folder": lambda folder: (
        shutil.rmtree(folder),
        folder.write_text("not a folder"),
    ),
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


@pytest.mark.parametrize("name", ["tokens.bin", "sha256.json"])
def test_any_byte_that_changes_is_noticed(source, tmp_path, name):
    prepare(source, tmp_path / "cache")
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    whole = (folder / name).read_bytes()
    for place in [*range(0, len(whole), 29), *range(len(whole) - 60, len(whole) - 1)]:
        overwrite(folder / name, place, bytes([whole[place] ^ 0x81]))
        with pytest.raises(Damaged):
            verify_hashes(folder)
        overwrite(folder / name, place, whole[place : place + 1])
    verify_hashes(folder)


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


def test_a_prepared_plain_text_called_compressed_is_refused(source, tmp_path):
    prepare(source, tmp_path / "cache")
    source.rename(packed := tmp_path / "a.txt.gz")

    with pytest.raises(DataError, match=r"a\.txt\.gz cannot be read"):
        prepare(packed, tmp_path / "cache")


def test_a_text_that_is_cut_short_while_it_is_read_ends_the_read(source, tmp_path):
    corpus = prepare(source, tmp_path / "cache")
    (tokens,) = (tmp_path / "cache").glob("*/tokens.bin")
    os.truncate(tokens, 4000)

    with pytest.raises(TextLost, match="The next start prepares it again"):
        text_of(corpus)
    assert text_of(prepare(source, tmp_path / "cache")) == TEXT


# Disks without locks.


@pytest.fixture
def no_locks(monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

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


@pytest.mark.parametrize("is_built_in", [False, True])
def test_caches_that_may_not_be_used_are_told(open_folder, is_built_in):
    source = "python-docs" if is_built_in else written(open_folder / "a.txt", TEXT)
    caches = {"read-only": 0o555, "closed": 0, "no-search": 0o644}
    for name, mode in caches.items():
        (open_folder / name).mkdir()
        closed(open_folder / name, mode)

    with as_nobody():
        for name in [*caches, "closed/inside", "read-only/inside"]:
            with pytest.raises(DataError, match="Permission denied") as caught:
                prepare(source, open_folder / name)
            assert str(caught.value).startswith(f"data.cache_dir={open_folder / name} cannot be")
    for name in caches:
        closed(open_folder / name, 0o700)


@pytest.mark.parametrize(
    ("cache", "reason"),
    [("x" * 300, "too long"), ("a.txt/inside", "directory")],
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
