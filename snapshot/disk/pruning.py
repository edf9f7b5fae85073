"""Removes snapshots and leftovers of them, and never what else lies in a folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from snapshot.disk.checking import check_snapshot
from snapshot.disk.files import (
    FILE_NAME,
    MANIFEST,
    TEMPORARY_PREFIX,
    manifest_entries,
    names_in,
    snapshot_folders,
    step_of,
    temporary_name,
)
from snapshot.errors import SnapshotError


def prune(
    root: Path,
    keep: int,
    newest: int,
    needed: Collection[Path] = (),
    whole: dict[Path, bool] | None = None,
) -> None:
    """Remove the snapshots before the `keep` newest whole ones, of those up to step `newest`.

    A damaged one does not count: the run would be left with fewer that it can resume from.
    Snapshots of later steps were skipped as damaged, and stay until the run gets there. Those in
    `needed` (by an upload) stay as well, and folders that hold more than a snapshot. `whole` says
    of snapshots whether they are whole; the others are verified where that decides, and added.
    Raises OSError, and SnapshotError if the folder cannot be read.
    """
    known = {} if whole is None else whole
    folders = [folder for folder in snapshot_folders(root) if step_of(folder) <= newest]
    counted = 0
    for place, folder in enumerate(folders):
        if counted < keep:
            if len(folders) - place <= keep - counted:
                return  # even if all of them are whole, none is too many
            if folder not in known:
                known[folder] = _is_whole(folder)
            counted += known[folder]
        elif folder not in needed and holds_only_snapshot(folder):
            remove_folder(folder)


def _is_whole(folder: Path) -> bool:
    try:
        check_snapshot(folder)
    except SnapshotError:
        return False
    return True


def remove_leftovers(root: Path) -> None:
    """Remove unfinished folders of killed processes. Only for the one process that writes here."""
    with suppress(OSError):  # an unreadable folder is reported by the search for a snapshot
        for path in root.glob(f"{TEMPORARY_PREFIX}*"):
            with suppress(OSError):
                remove_folder(path)


def holds_only_snapshot(folder: Path) -> bool:
    """Whether a folder has no file but those of a snapshot, damaged or not: it may be removed."""
    if not folder.is_dir() or folder.is_symlink():
        return False
    try:
        names = names_in(folder)
    except SnapshotError:
        return False
    try:
        own = {MANIFEST, *manifest_entries(folder)}
    except SnapshotError:
        own = {name for name in names if FILE_NAME.fullmatch(name)}
    return names <= own and not any((folder / name).is_dir() for name in names)


def unused_name(path: Path) -> Path:
    """`path` with the first of .old-1, .old-2, ... that is free, to set something aside."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.old-{number}")):
        number += 1
    return aside


def remove_folder(folder: Path) -> None:
    """Remove a folder, after a rename: a half-removed one must not look like a snapshot."""
    if not folder.is_dir() or folder.is_symlink():
        folder.unlink(missing_ok=True)
        return
    if not folder.name.startswith(TEMPORARY_PREFIX):
        folder = folder.rename(folder.with_name(temporary_name(folder.name)))
    shutil.rmtree(folder)


def make_way(folder: Path) -> None:
    """Free the name of a snapshot: what is there is damaged, or it would have been resumed from.

    Whatever holds more than a snapshot's files is not removed, but renamed. Raises OSError.
    """
    if holds_only_snapshot(folder):
        remove_folder(folder)
    elif os.path.lexists(folder):
        folder.rename(unused_name(folder))
