"""A snapshot as a folder on this disk: names, JSON, manifest, hashes; whole, or not there.

Nothing here interprets the files: the manifest lists each with its size and sha256. It is written
last, before one rename makes the folder visible. Only what a manifest lists is ever removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from snapshot.errors import SnapshotError

CHUNK_BYTES = 8 << 20
"""Small enough for any machine; large enough that hashing seldom waits for the interpreter lock."""
SYSTEM_FILES = re.compile(r"\.DS_Store|\._.+|Thumbs\.db|desktop\.ini|\.nfs[0-9a-f]+", re.IGNORECASE)
"""Files that file managers and NFS create in any folder; they are ignored."""
MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
LARGEST_JSON_BYTES = 16 << 20
SNAPSHOT_NAME = re.compile(r"step-([0-9]{8,13})")
LARGEST_STEP = 10**12
TEMPORARY_PREFIX = ".tmp-"
HASHING_THREADS = 8
"""Each reads and hashes one file at a time."""
DIGEST = re.compile(r"[0-9a-f]{64}")
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.(safetensors|json)")
MANIFEST_SHAPE = {
    "format": MANIFEST_FORMAT,
    "files": [{"path": FILE_NAME, "size": range(2**63), "sha256": DIGEST}],
}
"""Of its JSON, for `matches`."""


# Paths and names.


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn OSError into SnapshotError: a file that cannot be read is a fault of the snapshot."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise SnapshotError(f"{where} cannot be read: {error.strerror or error}") from error


def expanded(path: str) -> Path:
    """A path with `~` expanded, where it names a home that is known."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  Path raises for an unknown user


def visible(path: Path) -> Path:
    """`path` itself. Raises SnapshotError if permissions hide whether it exists."""
    with readable(path), suppress(FileNotFoundError, NotADirectoryError):
        path.stat()
    return path


def snapshots_in(run_dir: Path) -> Path:
    """The folder with the snapshots of a run."""
    return run_dir / "snapshots"


def folder_name(step: int) -> str:
    """The name of the snapshot after `step`: the only name that holds state."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """The step of a snapshot, from its name."""
    match = SNAPSHOT_NAME.fullmatch(folder.name)
    assert match is not None, f"{folder} is not named as a snapshot"
    return int(match[1])


def temporary_name(name: str, number: int | None = None) -> str:
    """A unique name: without locks another process may build or remove the same folder."""
    return f"{TEMPORARY_PREFIX}{name}-{uuid.uuid4().int >> 96 if number is None else number:08x}"


def snapshot_folders(root: Path) -> list[Path]:
    """The snapshots of a folder, newest first, verified or not.

    Raises SnapshotError if the folder cannot be read, because it may then hold snapshots.
    """
    with readable(root), suppress(FileNotFoundError, NotADirectoryError):
        named = [path for path in root.iterdir() if SNAPSHOT_NAME.fullmatch(path.name)]
        return sorted(named, key=step_of, reverse=True)
    return []


def names_in(folder: Path) -> set[str]:
    """The file names in a snapshot folder, without `SYSTEM_FILES`.

    Raises SnapshotError if the folder cannot be read.
    """
    with readable(folder):
        names = {path.name for path in folder.iterdir()}
    return {name for name in names if SYSTEM_FILES.fullmatch(name) is None}


# JSON.


def write_json(path: Path, content: Any) -> None:
    """Write JSON as text, UTF-8."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file atomically: the new one is flushed, then renamed.

    On a shared disk two processes may replace it at once, so each writes to a name of its own.
    """
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.new")
    try:
        partial.write_bytes(content)
        flush([partial])
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:
    """Read JSON of bounded size. Raises SnapshotError if it is larger, unreadable or not JSON."""
    with readable(path):
        if (size := path.stat().st_size) > LARGEST_JSON_BYTES:
            raise SnapshotError(
                f"{path} has {size:,} bytes; no JSON file of a snapshot is that large"
            )
        return parse_json(path.read_bytes(), str(path))


def parse_json(content: bytes, name: str) -> Any:
    """Parse untrusted JSON, whose size the caller has bounded. Raises SnapshotError."""
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"{name} cannot be read: {error}") from error


def matches(value: Any, shape: Any) -> bool:
    """Whether a value of untrusted JSON has a shape.

    A shape is a type (float is any number), a range of integers, a pattern of a whole text, a
    predicate, a tuple of alternatives, a list of one shape, a dictionary with exactly these keys,
    or any other value, which must be equal.
    """
    if isinstance(shape, tuple):
        return any(matches(value, one) for one in shape)
    if isinstance(shape, type):
        return type(value) in ((int, float) if shape is float else (shape,))
    if isinstance(shape, range):
        return type(value) is int and value in shape
    if isinstance(shape, re.Pattern):
        return isinstance(value, str) and shape.fullmatch(value) is not None
    if isinstance(shape, list):
        return isinstance(value, list) and all(matches(one, shape[0]) for one in value)
    if isinstance(shape, dict):
        is_same = isinstance(value, dict) and value.keys() == shape.keys()
        return is_same and all(matches(value[key], one) for key, one in shape.items())
    return bool(shape(value)) if callable(shape) else type(value) is type(shape) and value == shape


def between(least: float, most: float) -> Callable[[Any], bool]:
    """The shape of a number between two bounds; not NaN."""
    return lambda value: type(value) in (int, float) and least <= value <= most


# The manifest.


def sha256_of(path: Path) -> str:
    """The hash of a file. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as opened:
        part = memoryview(bytearray(min(os.fstat(opened.fileno()).st_size, CHUNK_BYTES)))
        while size := opened.readinto(part):
            digest.update(part[:size])
    return digest.hexdigest()


def manifest_sha256(folder: Path) -> str:
    """The sha256 of a snapshot's manifest, which identifies all of its content. Raises OSError."""
    return sha256_of(folder / MANIFEST)


def manifest_entries(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and sha256 by file name, from the manifest. Raises SnapshotError if it is not valid."""
    return entries_in(read_json(folder / MANIFEST), str(folder / MANIFEST))


def entries_in(manifest: Any, name: str) -> dict[str, tuple[int, str]]:
    """`manifest_entries` of a manifest's content; `name` is its own, for messages."""
    files = manifest["files"] if matches(manifest, MANIFEST_SHAPE) else []
    entries = {entry["path"]: (entry["size"], entry["sha256"]) for entry in files}
    if not files or len(entries) < len(files) or MANIFEST in entries:
        raise SnapshotError(f"{name} is not a manifest of this format")
    return entries


def verify(folder: Path) -> None:
    """Compare every file of a snapshot with the manifest.

    Raises SnapshotError with the first fault found: a missing, additional, truncated, changed or
    unreadable file, or an invalid manifest.
    """
    with readable(folder):
        if not (folder / MANIFEST).is_file() or (folder / MANIFEST).is_symlink():
            raise SnapshotError(f"{folder} is not a snapshot: it has no {MANIFEST}")
        entries = manifest_entries(folder)
        there = names_in(folder) - {MANIFEST}
        if unlisted := sorted(there - entries.keys()):
            raise SnapshotError(f"{folder}: {unlisted[0]} is not in its manifest")

        def check(name: str) -> None:
            path, (size, digest) = folder / name, entries[name]
            fault = None
            if name not in there:
                fault = "is missing"
            elif path.is_symlink() or not path.is_file():
                fault = "is not a plain file"
            elif (here := path.stat().st_size) != size:
                fault = f"has {here:,} bytes instead of {size:,}"
            elif sha256_of(path) != digest:
                fault = "has changed"
            if fault is not None:
                raise SnapshotError(f"{folder} is damaged: {name} {fault}")

        with ThreadPoolExecutor(HASHING_THREADS) as pool:
            list(pool.map(check, entries))  # raises the first fault


def newest_verified(
    folders: Iterable[Path], check: Callable[[Path], object] = verify
) -> tuple[Path | None, list[str]]:
    """The first snapshot that passes `check`, and what is wrong with each before it."""
    faults = []
    for folder in folders:
        try:
            check(folder)
        except SnapshotError as error:
            faults.append(str(error))
        else:
            return folder, faults
    return None, faults


# A folder appears whole.


@contextmanager
def atomic_folder(
    root: Path, name: str, displace: Callable[[Path], None] | None = None
) -> Iterator[Path]:
    """A temporary folder that becomes `root/name` when the block ends, and is removed if it fails.

    The block fills it. At its end everything is flushed to the disk, and one rename makes it
    visible, so that a kill at any moment leaves all of it or nothing. `displace(root/name)` removes
    what is there just before. Without it, a folder with files stays, and raises OSError.
    """
    root.mkdir(parents=True, exist_ok=True)
    building, final = root / temporary_name(name), root / name
    try:
        building.mkdir()
        yield building
        # The rename must not reach the disk before the content.
        flush([*(path for path in building.iterdir() if path.is_file()), building])
        if displace is not None:
            displace(final)
        building.rename(final)
        flush([root])
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


@contextmanager
def atomic_snapshot(root: Path, name: str) -> Iterator[Path]:
    """An `atomic_folder` that gets a manifest at the end of the block."""
    with atomic_folder(root, name, make_way) as building:
        yield building
        paths = sorted(building / name for name in names_in(building))
        with ThreadPoolExecutor(HASHING_THREADS) as pool:
            digests = list(pool.map(sha256_of, paths))
        files = [
            {"path": path.name, "size": path.stat().st_size, "sha256": digest}
            for path, digest in zip(paths, digests, strict=True)
        ]
        write_json(building / MANIFEST, {"format": MANIFEST_FORMAT, "files": files})


def flush(paths: Iterable[Path]) -> None:
    """fsync files and folders. Raises OSError."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# What stays, and what may be removed.


def stays(
    steps: Iterable[int],
    newest: int,
    keep: int,
    milestone_every: int | None = None,
    best: int | None = None,
) -> set[int]:
    """Which of a run's snapshots stay when that of step `newest` is there, on a disk or in a store.

    The `keep` newest, milestones, the best, and those of later steps, which another attempt took.
    """
    steps = set(steps)
    kept = {newest + 1, *sorted(step for step in steps if step <= newest)[-keep:]}
    milestones = {step for step in steps if milestone_every and step % milestone_every == 0}
    return {step for step in steps if step >= min(kept) or step == best} | milestones


def prune(
    root: Path, newest: int, keep: int, best: int | None = None, needed: Collection[Path] = ()
) -> None:
    """Remove the snapshots that do not stay (see `stays`), except those `needed` by an upload.

    A folder without a manifest does not count, and stays as those do that hold more than a
    snapshot. Raises OSError, and SnapshotError if `root` cannot be read.
    """
    folders = {
        step_of(folder): folder
        for folder in snapshot_folders(root)
        if (folder / MANIFEST).is_file()
    }
    staying = stays(folders, newest, keep, best=best)
    for step, folder in folders.items():
        if step not in staying and folder not in needed and holds_only_snapshot(folder):
            remove_folder(folder)


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
    with suppress(SnapshotError):
        names = names_in(folder)
        try:
            own = {MANIFEST, *manifest_entries(folder)}
        except SnapshotError:
            own = {name for name in names if FILE_NAME.fullmatch(name)}
        return names <= own and not any((folder / name).is_dir() for name in names)
    return False


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

    Whatever holds more than a snapshot's files is not removed: its name gets an ending. Raises
    OSError.
    """
    if holds_only_snapshot(folder):
        remove_folder(folder)
    elif os.path.lexists(folder):
        folder.rename(folder.with_name(f"{folder.name}.old-{uuid.uuid4().hex[:8]}"))
