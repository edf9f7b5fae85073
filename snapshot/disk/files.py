"""Snapshot folders on a disk: written whole or not at all, verified by hash, kept and pruned.

Nothing here knows what the files mean, only that a manifest names each with its size and sha256.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from snapshot.disk.reading import Inspect, check_file, names_in, not_inspected, readable, sha256_of
from snapshot.errors import SnapshotError

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
LARGEST_JSON_BYTES = 16 << 20
MOST_JSON_VALUES = 400_000
"""More than any vocabulary. A value of three bytes in a file takes up to 200 in memory."""
SNAPSHOT_NAME = re.compile(r"step-([0-9]{8,13})")
LARGEST_STEP = 10**12
TEMPORARY_PREFIX = ".tmp-"
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.(safetensors|json)")


def snapshots_in(run_dir: Path) -> Path:
    """The folder with the snapshots of a run."""
    return run_dir / "snapshots"


def folder_name(step: int) -> str:
    """The name of the snapshot after `step`; the only name from which state is read back."""
    return f"step-{step:08d}"


@contextmanager
def atomic_snapshot(root: Path, name: str, inspect: Inspect = not_inspected) -> Iterator[Path]:
    """A temporary folder that becomes `root/name` when the block ends, and vanishes when it fails.

    The block fills the folder; on leaving, the manifest is added, everything is flushed to the
    disk, and one rename makes it appear. A kill at any moment leaves either nothing that looks like
    a snapshot or a complete one. Raises SnapshotError for a file of which `inspect` finds a fault.
    """
    with atomic_folder(root, name) as building:
        yield building
        _write_manifest(building, inspect)


@contextmanager
def atomic_folder(root: Path, name: str) -> Iterator[Path]:
    """As `atomic_snapshot`, for a folder that brings its manifest."""
    root.mkdir(parents=True, exist_ok=True)
    building, final = root / _temporary(name), root / name
    try:
        building.mkdir()
        yield building
        _flush(building)
        remove_folder(final)  # a damaged one, where there is one: a good one is resumed from
        building.rename(final)
        _flush(root)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def write_json(path: Path, content: Any) -> None:
    """Write JSON as text, UTF-8."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read JSON of bounded size. Raises SnapshotError where it is not that."""
    try:
        size = path.stat().st_size
        if size > LARGEST_JSON_BYTES:
            raise SnapshotError(
                f"{path} has {size:,} bytes; no JSON file of a snapshot is that large"
            )
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror}") from error


def parse_json(content: bytes, name: str) -> Any:
    """JSON that may come from a stranger. Raises SnapshotError, before it can fill the memory."""
    if sum(content.count(mark) for mark in (b",", b"[", b"{")) > MOST_JSON_VALUES:
        raise SnapshotError(f"{name} holds more values than any JSON file of a snapshot")
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError:
        raise SnapshotError(f"{name} cannot be read: it is nested too deep") from None
    except ValueError as error:
        raise SnapshotError(f"{name} cannot be read: {error}") from error


def verify(
    folder: Path, names: Iterable[str] | None = None, inspect: Inspect = not_inspected
) -> None:
    """Read every file of a snapshot (or those of these names) and compare it with the manifest.

    Raises SnapshotError with the first fault found: a missing, additional, truncated or changed
    file, one that may not be read, a manifest that does not hold together, or what `inspect` finds
    in a file that is as its manifest says.
    """
    with readable(folder):
        if not folder.is_dir():
            raise SnapshotError(f"{folder} is not a folder")
        if not (folder / MANIFEST).is_file() or (folder / MANIFEST).is_symlink():
            raise SnapshotError(f"{folder} is no snapshot: it has no {MANIFEST}")
        entries = manifest_entries(folder)
        found = names_in(folder) - {MANIFEST}
        for name, (size, digest) in entries.items():
            if names is None or name in names:
                if name not in found:
                    raise SnapshotError(f"{folder} is damaged: {name} is missing")
                _verify_file(folder / name, size, digest, inspect)
        if unlisted := sorted(found - set(entries)):
            raise SnapshotError(f"{folder}: {unlisted[0]} is not in its manifest")


def _verify_file(path: Path, size: int, digest: str, inspect: Inspect) -> None:
    damaged = f"{path.parent} is damaged:"
    if path.is_symlink() or not path.is_file():
        raise SnapshotError(f"{damaged} {path.name} is not a plain file")
    if path.stat().st_size != size:
        found = path.stat().st_size
        raise SnapshotError(f"{damaged} {path.name} has {found:,} bytes instead of {size:,}")
    check_file(path, digest, inspect, str(path.parent))


def manifest_entries(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and sha256 by file name, of a manifest whose form has been checked.

    Raises SnapshotError.
    """
    manifest = read_json(folder / MANIFEST)
    fault = SnapshotError(f"{folder / MANIFEST} is not a manifest of this format")
    if not isinstance(manifest, dict) or type(manifest.get("format")) is not int:
        raise fault
    if manifest["format"] != MANIFEST_FORMAT:
        raise fault
    if not isinstance(manifest.get("files"), list):
        raise fault
    entries: dict[str, tuple[int, str]] = {}
    for entry in manifest["files"]:
        if not isinstance(entry, dict) or set(entry) != {"path", "size", "sha256"}:
            raise fault
        name, size, digest = entry["path"], entry["size"], entry["sha256"]
        if not isinstance(name, str) or FILE_NAME.fullmatch(name) is None or name in entries:
            raise SnapshotError(f"{folder / MANIFEST} names a file that no snapshot has: {name!r}")
        if type(size) is not int or not isinstance(digest, str) or name == MANIFEST:
            raise fault
        entries[name] = (size, digest)
    return entries


def manifest_sha256(folder: Path) -> str:
    """The sha256 of a snapshot's manifest, and so of everything in it. Raises OSError."""
    return sha256_of(folder / MANIFEST)


def snapshot_folders(root: Path) -> list[Path]:
    """The snapshots of a folder, newest first, verified or not.

    Raises SnapshotError where it may not be read: nobody knows then whether there are any.
    """
    with readable(root), suppress(FileNotFoundError, NotADirectoryError):
        named = [path for path in root.iterdir() if SNAPSHOT_NAME.fullmatch(path.name)]
        return sorted(named, key=step_of, reverse=True)
    return []


def step_of(folder: Path) -> int:
    """The step after which a snapshot was taken, by its name."""
    match = SNAPSHOT_NAME.fullmatch(folder.name)
    assert match is not None, f"{folder} is not named as a snapshot"
    return int(match[1])


def newest_verified(
    root: Path, check: Callable[[Path], object] = verify
) -> tuple[Path | None, list[str]]:
    """The newest snapshot of `root` that passes `check`, and what is wrong with each newer one."""
    faults = []
    for folder in snapshot_folders(root):
        try:
            check(folder)
        except SnapshotError as error:
            faults.append(str(error))
        else:
            return folder, faults
    return None, faults


def prune(root: Path, keep: int, newest: int, needed: Collection[Path] = ()) -> None:
    """Remove the oldest snapshots beyond `keep`, counted down from step `newest`.

    What is named as newer was passed over as damaged; it must not take the place of a good one.
    What is `needed` (by an upload) stays as well.
    """
    known = [folder for folder in snapshot_folders(root) if step_of(folder) <= newest]
    for folder in known[keep:]:
        if folder not in needed:
            remove_folder(folder)


def remove_leftovers(root: Path) -> None:
    """Remove what a killed process left unfinished. Only for the one process that writes here."""
    with suppress(OSError):  # where nobody may look, that is said when a snapshot is looked for
        for path in root.glob(f"{TEMPORARY_PREFIX}*"):
            with suppress(OSError):
                remove_folder(path)


def remove_folder(folder: Path) -> None:
    """Remove a folder, renamed first: half a removal must not look like a snapshot."""
    if not folder.is_dir() or folder.is_symlink():
        folder.unlink(missing_ok=True)
        return
    if not folder.name.startswith(TEMPORARY_PREFIX):
        folder = folder.rename(folder.with_name(_temporary(folder.name)))
    shutil.rmtree(folder)


def _temporary(name: str) -> str:
    """A name of its own: on a disk without locks another process may build or remove the same."""
    return f"{TEMPORARY_PREFIX}{name}-{uuid.uuid4().hex[:8]}"


def _write_manifest(folder: Path, inspect: Inspect) -> None:
    files = []
    for name in sorted(names_in(folder)):
        path = folder / name
        inspection = inspect(path)
        digest = sha256_of(path, inspection)
        if inspection is not None and inspection.fault is not None:
            raise SnapshotError(inspection.fault)
        files.append({"path": name, "size": path.stat().st_size, "sha256": digest})
    write_json(folder / MANIFEST, {"format": MANIFEST_FORMAT, "files": files})


def _flush(folder: Path) -> None:
    """fsync a folder and its files: a rename must not reach the disk before the content."""
    for path in [*(path for path in folder.iterdir() if path.is_file()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
