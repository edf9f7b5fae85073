"""Which snapshots of a folder stay."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from snapshot.disk.files import holds_only_snapshot, remove_folder, snapshot_folders, step_of
from snapshot.disk.state import check_snapshot
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
