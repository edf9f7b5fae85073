"""A folder of a disk as a store: listed, and written without ever creating it."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from store.errors import NoFile, StoreError, StoreMissing
from store.file_system import FileSystem
from store.files import BLOCK_BYTES
from store.latest import FOLDER, SNAPSHOTS

OF_RUN = re.compile(r"snapshots(/|$)")
"""How the paths begin that may hold snapshots."""
PART = ".partial-"
"""How a file is called until all of it is there."""


class Disk(FileSystem):
    """A folder of a disk, which may be shared by machines, and may not be mounted."""

    def _check(self) -> None:
        """Raise StoreMissing if there is no such folder: the disk may not be mounted."""
        try:
            is_folder = stat.S_ISDIR(self._ask(partial(os.stat, self._root)).st_mode)
        except NoFile:
            is_folder = False
        if not is_folder:
            raise StoreMissing(
                f"there is no folder {self._root}. Mount that disk, or check {self.key}.",
                "no folder",
            )

    def create(self, private: bool) -> None:
        """Create the folder, in one that must exist."""
        try:
            self._ask(partial(Path(self._root).mkdir, exist_ok=True))
        except NoFile as error:
            raise StoreMissing(
                f"there is no folder {Path(self._root).parent}. Mount that disk, or check "
                f"{self.key}.",
                "no folder",
            ) from error

    def list_files(self) -> dict[str, int]:
        """The sizes of all files by path."""
        self._check()
        return self._ask(partial(files_below, Path(self._root)))

    def write(self, path: str, source: BinaryIO) -> str:
        """Write a file, which appears under its name when all of it is on the disk."""
        self._check()
        target, digest = Path(self._at(path)), hashlib.sha256()
        match = FOLDER.fullmatch(path)
        if match is not None:  # an attempt's own; the next file has the same name meanwhile
            part = Path(self._at(f"{SNAPSHOTS}/{PART}{match[3]}"))
        else:  # several attempts may write it at once
            part = Path(self._at(f"{PART}{uuid.uuid4().hex[:8]}"))
        self._ask(partial(_make_folders, Path(self._root), target.parent))
        try:
            opened = cast(BinaryIO, self._ask(partial(open, part, "wb")))
            try:
                while block := source.read(BLOCK_BYTES):
                    digest.update(block)
                    self._ask(partial(opened.write, block))
                self._ask(opened.flush)
                self._ask(partial(os.fsync, opened.fileno()))
            finally:
                self._ask(opened.close)
            self._ask(partial(part.replace, target))
        except BaseException:
            if match is None:
                with suppress(StoreError):
                    self._ask(partial(part.unlink, missing_ok=True))
            raise
        return digest.hexdigest()

    def delete(self, path: str) -> None:
        """Delete a file, and its folder if that is empty then."""
        super().delete(path)
        with suppress(OSError):
            Path(self._at(path)).parent.rmdir()


def _make_folders(root: Path, folder: Path) -> None:
    for name in folder.relative_to(root).parts:
        root = root / name
        root.mkdir(exist_ok=True)


def files_below(root: Path, inside: str = "") -> dict[str, int]:
    """The sizes of all files of a folder by path; links to folders are followed.

    Raises OSError if it does not exist, or where it cannot be read: snapshots may be there. Files
    that are deleted meanwhile are left out.
    """
    folder, found = root / inside, dict[str, int]()
    try:
        with os.scandir(folder) as opened:
            entries = list(opened)
    except FileNotFoundError:
        if not inside:
            raise
        return {}
    except PermissionError:
        if not inside or OF_RUN.match(inside):
            raise
        return {}  # lost+found of a whole disk
    for entry in entries:
        path = inside + entry.name
        if entry.is_dir():
            if not (entry.is_symlink() and _is_above(Path(entry), folder)):
                found |= files_below(root, f"{path}/")
        elif entry.is_file():
            with suppress(FileNotFoundError):
                found[path] = entry.stat().st_size
        elif entry.is_symlink() and OF_RUN.match(path):  # perhaps to a disk that is not mounted
            raise OSError(errno.EIO, "a link to nothing", entry.path)
    return found


def _is_above(link: Path, folder: Path) -> bool:
    """Whether a link leads to a folder that it is in: it holds nothing new."""
    return any(link.samefile(above) for above in (folder, *folder.parents))
