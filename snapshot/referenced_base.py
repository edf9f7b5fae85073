"""The base of snapshots that hold only what is trained: kept at the start, verified at a resume."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from snapshot.base import SMALL_FILES, Base, naming
from snapshot.disk.files import SNAPSHOT_NAME, snapshot_folders, snapshots_in
from snapshot.disk.reading import readable
from snapshot.disk.reference import WEIGHTS, BaseReference
from snapshot.errors import SnapshotError
from snapshot.hub.client import Hub
from snapshot.hub.remote import RemoteFile
from snapshot.store import with_retries

OWN_BASE = "base"
"""In a run's directory: the base of its snapshots."""


def open_reference(
    base: BaseReference, where: Path, timeout: float, instead: str | None = None
) -> Base:
    """The base of the snapshot at `where`, verified. `instead` is a folder that may hold it, too.

    Raises SnapshotError if it is not there or has changed, HubError if it cannot be downloaded.
    """
    weights = {name: RemoteFile(*entry) for name, entry in base.files.items()}
    label = base.name if base.commit is None else f"{base.name}@{base.commit[:12]}"
    key = f"{where} holds only what was trained. Its base {label}"
    if base.commit is not None:
        hub = Hub(base.name, timeout)
        commit, first = base.commit, next(iter(weights))
        with naming(key):
            folder = with_retries(lambda: hub.download(commit, first, None)).parent
        return Base(key, label, folder, hub, commit, tuple(weights.items()))
    changed = None
    for folder in _folders_that_may_hold(base, where, instead):
        with readable(folder):
            if not all((folder / name).is_file() for name in weights):
                continue
        found = Base(key, label, folder, weights=tuple(weights.items()))
        try:
            found.fetch_weights()
            return replace(found, weights=())
        except SnapshotError as error:
            changed = error
    raise changed or SnapshotError(
        f"{key} is not there. Restore it. A resume also takes the folder where it is now: "
        "model.pretrained=<folder>."
    )


def _folders_that_may_hold(base: BaseReference, where: Path, instead: str | None) -> Iterator[Path]:
    if instead is not None:
        other = Path(instead).expanduser()
        yield from (other, *snapshot_folders(snapshots_in(other)), *snapshot_folders(other))
    yield where.parent.parent / OWN_BASE  # the run's directory may have been moved
    yield Path(base.name)


def keep_base(base: Base, run_dir: Path) -> Base:
    """Keep the files of a local base in the run's directory, as links that take no space.

    The folder may be a snapshot that its run removes. On another file system a snapshot is copied,
    and any other folder stays where it is. Raises OSError.
    """
    if base.repo is not None:
        return base
    own = run_dir.absolute() / OWN_BASE
    own.mkdir(parents=True, exist_ok=True)
    for path in base.folder.iterdir():
        if WEIGHTS.fullmatch(path.name) is None and path.name not in SMALL_FILES:
            continue
        (own / path.name).unlink(missing_ok=True)
        try:
            os.link(path.resolve(), own / path.name)
        except OSError:
            if SNAPSHOT_NAME.fullmatch(base.folder.name) is None:
                shutil.rmtree(own)
                return base
            shutil.copyfile(path, own / path.name)
    return replace(base, folder=own)
