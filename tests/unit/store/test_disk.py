"""A folder of a disk as a store: "nothing is there" is never said of what cannot be read."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from store.errors import StoreError, StoreMissing, StoreRefused, StoreUnreachable, disk_error
from store.files import Disk
from store.latest import foreign_file

RUN, FOLDER = "snapshots", "snapshots/step-00000001-aaaaaaaa"
PATH = f"{FOLDER}/manifest.json"
HERE = "/run/model.safetensors"
LOCAL_ERRORS = (errno.ENOENT, errno.EACCES, errno.ESTALE, errno.EMFILE, errno.EIO)


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


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EIO, StoreUnreachable), (errno.ESTALE, StoreUnreachable), (errno.EACCES, StoreRefused)],
)
@pytest.mark.parametrize("place", ["", RUN, FOLDER])
def test_a_folder_that_cannot_be_listed_is_an_error(root, monkeypatch, number, kind, place):
    fails(monkeypatch, "scandir", number, lambda path: path == str(root / place))
    with pytest.raises(kind):
        listed(root)


def test_a_store_that_is_gone_is_missing(root):
    store = Disk(f"file://{root}", 5.0)
    root.rename(root.with_name("unmounted"))
    with pytest.raises(StoreMissing, match="does not exist"):
        store.head()


def test_what_is_deleted_during_a_listing_is_left_out(root, monkeypatch):
    fails(monkeypatch, "scandir", errno.ENOENT, lambda path: path.endswith(FOLDER))
    assert listed(root) == ["latest.json"]


def test_links_are_followed(root, tmp_path):
    (root / RUN).rename(tmp_path / "other disk")
    (root / RUN).symlink_to(tmp_path / "other disk")
    assert listed(root) == ["latest.json", PATH]


def test_a_latest_json_on_a_full_disk_leaves_the_old_one(root, monkeypatch):
    store, before = Disk(f"file://{root}", 5.0), listed(root)
    with monkeypatch.context() as full:
        fails(full, "fsync", errno.ENOSPC, lambda _: True)
        with pytest.raises(StoreRefused, match="No space left on device"):
            store.write("latest.json", b"new")
    assert listed(root) == before
    assert (root / "latest.json").read_bytes() == b"{}"
    store.write("latest.json", b"new")
    assert (root / "latest.json").read_bytes() == b"new"
    assert listed(root) == before


def test_of_two_that_write_a_latest_json_at_once_each_writes_a_whole_one(root, monkeypatch):
    """The second begins, and is killed, when the first has written all but the last rename."""
    store, real = Disk(f"file://{root}", 5.0), os.fsync

    def begin_another(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", killed)
        with pytest.raises(StoreError):
            store.write("latest.json", b"")
        monkeypatch.setattr(os, "fsync", real)

    def killed(descriptor: int) -> None:
        raise RuntimeError  # which removes no file

    monkeypatch.setattr(os, "fsync", begin_another)
    store.write("latest.json", b"whole")
    assert (root / "latest.json").read_bytes() == b"whole"
    assert len(listed(root)) == 3  # with what the killed one has left
    assert foreign_file(listed(root)) is None


@pytest.mark.parametrize(
    ("number", "names", "kind"),
    [
        (errno.ENOSPC, "nothing", OSError),
        (errno.EDQUOT, "the store", OSError),  # as shutil does
        (errno.EACCES, "this disk", OSError),
        (errno.EACCES, "the store", StoreRefused),
        (errno.EIO, "nothing", StoreUnreachable),
    ],
)
def test_a_disk_that_refuses_a_download_is_not_the_store_s_fault(
    root, tmp_path, monkeypatch, number, names, kind
):
    store = Disk(f"file://{root}", 5.0)

    def get_file(path: str, target: str) -> None:
        named = {"nothing": (), "the store": (path,), "this disk": (target,)}[names]
        raise OSError(number, os.strerror(number), *named)

    monkeypatch.setattr(store._fs, "get_file", get_file)
    with pytest.raises(kind, match=os.strerror(number)):
        store.fetch(store.head(), ["latest.json"], tmp_path / "here")


def test_files_of_file_managers_are_nobody_s():
    names = (".DS_Store", "Thumbs.db", "._latest.json", ".nfs00000001")
    killed = ("latest.json.0123abcd.new", "metrics.jsonl.0123abcd.new", "latest.json.new")
    assert foreign_file([*names, *(f"{FOLDER}/{name}" for name in names)]) is None
    assert foreign_file([PATH, "metrics.jsonl", *killed]) is None
    assert foreign_file([PATH, "README.md"], has_commits=True) == PATH  # a commit is whole
    assert foreign_file(["metrics.jsonl"]) == "metrics.jsonl"
    assert foreign_file(["DS_Store"]) == "DS_Store"
    for name in ("mine/latest.json.new", "latest.json.mine.new", "README.md.0123abcd.new"):
        assert foreign_file([PATH, name]) == name


@pytest.mark.parametrize(
    ("number", "names", "store_folder", "is_here"),
    [
        *((number, [HERE], None, True) for number in LOCAL_ERRORS),
        *((number, [HERE], "/store", True) for number in LOCAL_ERRORS),
        (errno.EIO, [], None, True),  # while a snapshot is read
        (errno.EIO, [HERE, "/store/model.safetensors"], "/store", False),  # as shutil names both
        (errno.EACCES, ["/store/model.safetensors"], "/store", False),
        (errno.EACCES, ["smb://host/run"], None, False),
        (errno.EACCES, [], None, False),
        (errno.EACCES, [constants.HF_TOKEN_PATH], None, False),
    ],
)
@pytest.mark.parametrize("downloads", [False, True])
def test_an_error_that_names_a_file_of_this_disk_is_not_the_store_s(
    number, names, store_folder, is_here, downloads
):
    error = OSError(number, os.strerror(number), *names[:1])
    error.filename2 = names[1] if len(names) > 1 else None
    folder = None if store_folder is None else Path(store_folder)
    assert disk_error(error, downloads, folder) is (error if is_here else None)
