"""Snapshot folders on disk: names, JSON, manifest, hashes.

Nothing here interprets the files: a manifest lists each with its size and sha256.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from snapshot.errors import SnapshotError, WrittenBefore

CHUNK_BYTES = 8 << 20
"""Small enough for any machine; large enough that hashing seldom waits for the interpreter lock."""
SYSTEM_FILES = re.compile(r"\.DS_Store|\._.+|Thumbs\.db|desktop\.ini|\.nfs[0-9a-f]+", re.IGNORECASE)
"""Files that file managers and NFS create in any folder; they are ignored."""
MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
LARGEST_JSON_BYTES = 16 << 20
MOST_JSON_VALUES = 400_000
"""More than any vocabulary needs. A value of three bytes in a file takes up to 200 in memory."""
MOST_DIGITS = 300
"""Of an integer: the largest float has 309. tokenizer_config.json of many models has one of 31."""
SNAPSHOT_NAME = re.compile(r"step-([0-9]{8,13})")
LARGEST_STEP = 10**12
TEMPORARY_PREFIX = ".tmp-"
VERIFYING_THREADS = 8
"""Each reads and hashes one file at a time."""
ReadFile = Callable[[Path], tuple[str, str | None]]
"""Returns the sha256 of a file, and what is wrong in it, if anything."""
DIGEST = re.compile(r"[0-9a-f]{64}")
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.(safetensors|json)")


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
    with suppress(RuntimeError):
        return Path(path).expanduser()
    return Path(path)


def visible(path: Path) -> Path:
    """`path` itself. Raises SnapshotError if permissions hide whether it exists."""
    with readable(path), suppress(FileNotFoundError, NotADirectoryError):
        path.stat()
    return path


def names_in(folder: Path) -> set[str]:
    """The file names in a snapshot folder, without `SYSTEM_FILES`.

    Raises SnapshotError if the folder cannot be read.
    """
    with readable(folder):
        names = {path.name for path in folder.iterdir()}
    return {name for name in names if SYSTEM_FILES.fullmatch(name) is None}


def sha256_of(path: Path, look: Callable[[memoryview], None] | None = None) -> str:
    """The hash of a file; `look` sees its content, in parts. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as opened:
        file_size = os.fstat(opened.fileno()).st_size
        part = memoryview(bytearray(min(file_size, CHUNK_BYTES)))  # reused for each part
        while size := opened.readinto(part):
            digest.update(part[:size])
            if look is not None:
                look(part[:size])
    return digest.hexdigest()


def read_plain(path: Path) -> tuple[str, str | None]:
    """The hash of a file, and no fault: what is in it is not looked at."""
    return sha256_of(path), None


def check_file(path: Path, digest: str, read: ReadFile, snapshot: str) -> None:
    """Raise SnapshotError if the hash of a file differs, or if `read` finds a fault in it.

    `snapshot` names the snapshot in messages. Raises OSError too.
    """
    found, fault = read(path)
    if found != digest:
        raise SnapshotError(f"{snapshot} is damaged: the content of {path.name} has changed")
    if fault is not None:
        raise SnapshotError(fault)


def snapshots_in(run_dir: Path) -> Path:
    """The folder with the snapshots of a run."""
    return run_dir / "snapshots"


def folder_name(step: int) -> str:
    """The name of the snapshot after `step`: the only name that holds state."""
    return f"step-{step:08d}"


def write_json(path: Path, content: Any) -> None:
    """Write JSON as text, UTF-8."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_whole(path: Path, content: str) -> None:
    """Replace a file atomically: the new one is flushed, then renamed."""
    partial = path.with_name(f"{path.name}.new")
    try:
        with open(partial, "w", encoding="utf-8") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:
    """Read JSON of bounded size. Raises SnapshotError if it is larger, unreadable or not JSON."""
    try:
        size = path.stat().st_size
        if size > LARGEST_JSON_BYTES:
            raise SnapshotError(
                f"{path} has {size:,} bytes; no JSON file of a snapshot is that large"
            )
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror}") from error


def count_json_values(content: bytes) -> int:
    """The most values that JSON of these bytes can hold, without parsing it."""
    return sum(content.count(mark) for mark in (b",", b"[", b"{"))


def parse_json(content: bytes, name: str) -> Any:
    """Parse untrusted JSON. Raises SnapshotError before the values can fill the memory."""
    if count_json_values(content) > MOST_JSON_VALUES:
        raise SnapshotError(f"{name} holds more values than any JSON file of a snapshot")
    try:
        return json.loads(content.decode("utf-8"), parse_int=_whole_number)
    except RecursionError:
        raise SnapshotError(f"{name} cannot be read: it is nested too deeply") from None
    except ValueError as error:
        raise SnapshotError(f"{name} cannot be read: {error}") from error


def _whole_number(digits: str) -> int:
    """An integer of JSON. Raises ValueError for one that no floating-point number can hold."""
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"it holds a number of {len(digits)} digits")
    return int(digits)


def verify(
    folder: Path,
    names: Iterable[str] | None = None,
    read: ReadFile = read_plain,
) -> None:
    """Compare every file of a snapshot (or only those in `names`) with the manifest.

    Raises SnapshotError with the first fault found: a missing, additional, truncated, changed or
    unreadable file, an invalid manifest, or a fault that `read` finds in a file.
    """
    with readable(folder):
        if not folder.is_dir():
            raise SnapshotError(f"{folder} is not a folder")
        if not (folder / MANIFEST).is_file() or (folder / MANIFEST).is_symlink():
            if snapshots_in(folder).is_dir():
                raise SnapshotError(f"{folder} is a run's directory that has no snapshot yet")
            raise SnapshotError(f"{folder} is not a snapshot: it has no {MANIFEST}")
        entries = manifest_entries(folder)
        found = names_in(folder) - {MANIFEST}
        wanted = [name for name in entries if names is None or name in names]
        if missing := next((name for name in wanted if name not in found), None):
            raise SnapshotError(f"{folder} is damaged: {missing} is missing")
        pool = ThreadPoolExecutor(VERIFYING_THREADS)
        try:
            checks = [
                pool.submit(_verify_file, folder / name, *entries[name], read) for name in wanted
            ]
            for check in checks:
                check.result()
        finally:
            pool.shutdown(cancel_futures=True)
        if unlisted := sorted(found - set(entries)):
            raise SnapshotError(f"{folder}: {unlisted[0]} is not in its manifest")


def _verify_file(path: Path, size: int, digest: str, read: ReadFile) -> None:
    damaged = f"{path.parent} is damaged:"
    if path.is_symlink() or not path.is_file():
        raise SnapshotError(f"{damaged} {path.name} is not a plain file")
    if path.stat().st_size != size:
        found = path.stat().st_size
        raise SnapshotError(f"{damaged} {path.name} has {found:,} bytes instead of {size:,}")
    check_file(path, digest, read, str(path.parent))


def manifest_entries(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and sha256 by file name, from the manifest. Raises SnapshotError if it is not valid."""
    return entries_in(read_json(folder / MANIFEST), str(folder / MANIFEST))


def entries_in(manifest: Any, name: str) -> dict[str, tuple[int, str]]:
    """`manifest_entries` of a manifest's content; `name` is its own, for messages."""
    fault = SnapshotError(f"{name} is not a manifest of this format")
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
        path, size, digest = entry["path"], entry["size"], entry["sha256"]
        if not isinstance(path, str) or FILE_NAME.fullmatch(path) is None or path in entries:
            raise SnapshotError(f"{name} names a file that no snapshot has: {path!r}")
        if type(size) is not int or size < 0 or path == MANIFEST:
            raise fault
        if not isinstance(digest, str) or DIGEST.fullmatch(digest) is None:
            raise fault
        entries[path] = (size, digest)
    return entries


def manifest_sha256(folder: Path) -> str:
    """The sha256 of a snapshot's manifest, which identifies all of its content. Raises OSError."""
    return sha256_of(folder / MANIFEST)


def snapshot_folders(root: Path) -> list[Path]:
    """The snapshots of a folder, newest first, verified or not.

    Raises SnapshotError if the folder cannot be read, because it may then hold snapshots.
    """
    with readable(root), suppress(FileNotFoundError, NotADirectoryError):
        named = [path for path in root.iterdir() if SNAPSHOT_NAME.fullmatch(path.name)]
        return sorted(named, key=step_of, reverse=True)
    return []


def step_of(folder: Path) -> int:
    """The step of a snapshot, from its name."""
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
        except WrittenBefore:  # so are those before it
            raise
        except SnapshotError as error:
            faults.append(str(error))
        else:
            return folder, faults
    return None, faults


def temporary_name(name: str) -> str:
    """A unique name: without locks another process may build or remove the same folder."""
    return f"{TEMPORARY_PREFIX}{name}-{uuid.uuid4().hex[:8]}"
