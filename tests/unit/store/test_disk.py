"""A folder of a disk as a store: "nothing is there" is never said of what cannot be read."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest

from store.errors import StoreMissing, StoreRefused, StoreUnreachable
from store.files import Disk

RUN, FOLDER = "snapshots", "snapshots/step-00000001-aaaaaaaa"
PATH = f"{FOLDER}/manifest.json"


@pytest.fixture
def root(tmp_path) -> Path:
    """A store's folder with a snapshot."""
    (tmp_path / "run" / PATH).parent.mkdir(parents=True)
    for path in (PATH, "latest.json"):
        (tmp_path / "run" / path).write_bytes(b"{}")
    return tmp_path / "run"


def listed(root: Path) -> list[str]:
    return [*Disk(f"file://{root}", 5.0).head().files]


def fails(monkeypatch, name: str, number: int, meets: Callable[[str], bool]) -> None:
    """From now on, a function of `os` fails for some paths."""
    real = getattr(os, name)

    def call(path, *more, **named):
        if meets(os.fspath(path) if isinstance(path, str | Path) else str(path)):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *more, **named)

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT])
@pytest.mark.parametrize("place", ["", RUN, FOLDER])
def test_a_folder_that_cannot_be_listed_is_an_error(root, monkeypatch, number, place):
    fails(monkeypatch, "scandir", number, lambda path: path == str(root / place))
    with pytest.raises(StoreUnreachable):
        listed(root)


def test_a_store_whose_folder_cannot_be_looked_at_is_not_a_new_one(root, monkeypatch):
    fails(monkeypatch, "stat", errno.EIO, lambda path: path == str(root))
    with pytest.raises(StoreUnreachable):
        Disk(f"file://{root}", 5.0).head()


def test_a_run_of_another_user_is_an_error_and_a_folder_of_the_system_is_not(root, monkeypatch):
    (root / "lost+found").mkdir()
    fails(monkeypatch, "scandir", errno.EACCES, lambda path: path.endswith("lost+found"))
    assert listed(root) == ["latest.json", PATH]
    monkeypatch.undo()
    fails(monkeypatch, "scandir", errno.EACCES, lambda path: path.endswith(RUN))
    with pytest.raises(StoreRefused, match="Check the credentials and their permissions"):
        listed(root)


def test_what_is_deleted_during_a_listing_is_left_out(root, monkeypatch):
    fails(monkeypatch, "scandir", errno.ENOENT, lambda path: path.endswith(FOLDER))
    assert listed(root) == ["latest.json"]


def test_links_are_followed_and_a_link_to_nothing_is_an_error(root, tmp_path):
    moved = tmp_path / "other disk"
    (root / RUN).rename(moved)
    (root / RUN).symlink_to(moved)
    (root / RUN / "up").symlink_to(root)  # holds nothing new, and has no end
    (root / "dead").symlink_to("nowhere")  # where no snapshot can be
    assert listed(root) == ["latest.json", PATH]
    moved.rename(tmp_path / "unmounted")
    with pytest.raises(StoreUnreachable, match="a link to nothing"):
        listed(root)


def test_a_store_that_is_gone_is_never_created_by_a_write(root, tmp_path):
    store = Disk(f"file://{root}", 5.0)
    shutil.rmtree(root)
    for request in (store.head, lambda: store.write(PATH, BytesIO(b"new"))):
        with pytest.raises(StoreMissing, match=r"there is no folder .*run\. Mount that disk"):
            request()
    assert not root.exists()


def test_a_latest_json_on_a_full_disk_leaves_the_old_one(root, monkeypatch):
    store, before = Disk(f"file://{root}", 5.0), listed(root)
    with monkeypatch.context() as full:
        fails(full, "fsync", errno.ENOSPC, lambda _: True)
        with pytest.raises(StoreRefused, match="no room left"):
            store.write("latest.json", BytesIO(b"new"))
    assert listed(root) == before
    assert (root / "latest.json").read_bytes() == b"{}"
    store.write("latest.json", BytesIO(b"new"))
    assert (root / "latest.json").read_bytes() == b"new"
    assert listed(root) == before


def test_small_files_need_no_temporary_folder(root, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/none")
    for content in (b"1", b"2"):
        Disk(f"file://{root}", 5.0).write("latest.json", BytesIO(content))
    assert (root / "latest.json").read_bytes() == b"2"


def test_files_of_file_managers_are_nobody_s(root):
    store = Disk(f"file://{root}", 5.0)
    names = (".DS_Store", "Thumbs.db", "._latest.json", ".nfs00000001", ".partial-0123abcd")
    assert store.foreign_file([*names, *(f"{FOLDER}/{name}" for name in names[:4])]) is None
    assert store.foreign_file(["DS_Store"]) == "DS_Store"
    assert store.foreign_file(["mine/.partial-0123abcd"]) == "mine/.partial-0123abcd"
