"""A folder of a disk as a store of files: listed, and written without ever creating it."""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from pathlib import Path

NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Errors of a disk that has no hard links."""
OF_RUN = re.compile(r"snapshots(/|$)")
"""How the paths begin that may hold snapshots."""


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


def make_folders(root: Path, folder: Path) -> None:
    """Create a folder in a root, which must exist: it may be on a disk that is not mounted now."""
    for name in folder.relative_to(root).parts:
        root = root / name
        root.mkdir(exist_ok=True)


def give_name(part: Path, target: Path, replaces: bool) -> None:
    """Rename a file. Raises FileExistsError if there is one, unless it `replaces` that."""
    if not replaces:
        try:
            os.link(part, target)
            part.unlink()
            return
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
        if target.exists():
            raise FileExistsError(errno.EEXIST, "File exists", str(target))
    part.replace(target)
