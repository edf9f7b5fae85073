"""Folders that are written atomically: whole under their name, or absent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from snapshot.disk.files import (
    MANIFEST,
    MANIFEST_FORMAT,
    holds_only_snapshot,
    remove_folder,
    temporary_name,
    unused_name,
    write_json,
)
from snapshot.disk.reading import InspectorFor, names_in, no_inspector, sha256_of
from snapshot.errors import SnapshotError


@contextmanager
def atomic_snapshot(
    root: Path,
    name: str,
    inspector_for: InspectorFor = no_inspector,
    digests: Mapping[str, str] | None = None,
) -> Iterator[Path]:
    """A temporary folder that becomes `root/name` when the block ends, and is removed if it fails.

    The block fills the folder. At its end the manifest is added, everything is flushed to the disk,
    and one rename makes the snapshot visible. A kill at any moment leaves either a complete
    snapshot or nothing that looks like one. Raises SnapshotError if an inspector finds a fault.
    Files whose sha256 is in `digests` by then have been inspected already.
    """
    with atomic_folder(root, name, make_way) as building:
        yield building
        _write_manifest(building, inspector_for, digests or {})


@contextmanager
def atomic_folder(
    root: Path, name: str, displace: Callable[[Path], None] | None = None
) -> Iterator[Path]:
    """As `atomic_snapshot`, for a folder whose content includes the manifest, or needs none.

    `displace(root/name)` removes what is there just before the rename. Without it, a folder with
    files stays, and raises OSError.
    """
    root.mkdir(parents=True, exist_ok=True)
    building, final = root / temporary_name(name), root / name
    try:
        building.mkdir()
        yield building
        _flush(building)
        if displace is not None:
            displace(final)
        building.rename(final)
        _flush(root)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def make_way(folder: Path) -> None:
    """Free the name of a snapshot: what is there is damaged, or it would have been resumed from.

    Whatever holds more than a snapshot's files is not removed, but renamed. Raises OSError.
    """
    if holds_only_snapshot(folder):
        remove_folder(folder)
    elif os.path.lexists(folder):
        folder.rename(unused_name(folder))


def inspected_sha256(path: Path, inspector_for: InspectorFor) -> str:
    """The hash of a file. Raises SnapshotError if its inspector finds a fault, and OSError."""
    inspector = inspector_for(path)
    digest = sha256_of(path, inspector)
    if inspector is not None and inspector.fault is not None:
        raise SnapshotError(inspector.fault)
    return digest


def _write_manifest(folder: Path, inspector_for: InspectorFor, digests: Mapping[str, str]) -> None:
    files = []
    for name in sorted(names_in(folder)):
        path = folder / name
        digest = digests.get(name) or inspected_sha256(path, inspector_for)
        files.append({"path": name, "size": path.stat().st_size, "sha256": digest})
    write_json(folder / MANIFEST, {"format": MANIFEST_FORMAT, "files": files})


def _flush(folder: Path) -> None:
    """fsync a folder and its files: the rename must not reach the disk before the content."""
    for path in [*(path for path in folder.iterdir() if path.is_file()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
