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
from texts import TEXT, prepare, text_of, written


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr("data.progress.FIRST_SECONDS", 600)  # a busy disk says nothing more


@pytest.fixture
def source(tmp_path):
    return written(tmp_path / "a.txt", TEXT)


def folders(cache):
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


DAMAGE = {
    "tokens cut short": lambda folder: os.truncate(folder / "tokens.bin", 5000),
    "no tokens": lambda folder: (folder / "tokens.bin").write_bytes(b""),
    "a folder in place of the tokens": lambda folder: (
        (folder / "tokens.bin").unlink(),
        (folder / "tokens.bin").mkdir(),
    ),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "a tokenizer cut short": lambda folder: os.truncate(folder / "tokenizer.json", 100),
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
    for _ in range(2):
        corpus = prepare(source, cache, say=lines.append)
        assert text_of(corpus) == TEXT
        assert corpus.info.fingerprint == fingerprint
        assert folders(cache) == [name]  # nothing of the damaged one is left
    (line,) = lines
    assert line.startswith(f"warning: the prepared text in {cache / name} cannot be loaded: ")


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


def test_on_a_disk_without_locks_the_first_of_two_is_used_by_both(source, tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
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


@pytest.mark.parametrize("is_built_in", [False, True])
def test_caches_that_may_not_be_used_are_told(is_built_in):
    with tempfile.TemporaryDirectory() as name:  # pytest's own are their user's
        open_folder = Path(name)
        open_folder.chmod(0o777)
        source = "python-docs" if is_built_in else written(open_folder / "a.txt", TEXT)
        caches = {"read-only": 0o555, "closed": 0, "no-search": 0o644}
        for name, mode in caches.items():
            (open_folder / name).mkdir()
            (open_folder / name).chmod(mode)
        with as_nobody():
            for name in [*caches, "closed/inside", "read-only/inside"]:
                with pytest.raises(DataError, match="Permission denied") as caught:
                    prepare(source, open_folder / name)
                assert str(caught.value).startswith(f"data.cache_dir={open_folder / name} cannot")
        for name in caches:
            (open_folder / name).chmod(0o700)


@pytest.mark.parametrize(
    ("cache", "reason"),
    [("x" * 300, "too long"), ("a.txt/inside", "directory")],
)
def test_a_cache_folder_that_cannot_be_is_told(source, tmp_path, monkeypatch, cache, reason):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=rf"data\.cache_dir=.*{reason}"):
        prepare(source, cache)


def test_a_cache_folder_of_the_home_is_in_the_home(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    prepare(source, "~/texts")

    assert folders(tmp_path / "home/texts")
    assert not (tmp_path / "~").exists()
