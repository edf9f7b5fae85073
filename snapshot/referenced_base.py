"""The base of snapshots that hold only what is trained: kept at the start, verified at a resume."""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from snapshot.base import SMALL_FILES, Base, naming
from snapshot.disk.files import (
    SNAPSHOT_NAME,
    TEMPORARY_PREFIX,
    snapshot_folders,
    snapshots_in,
)
from snapshot.disk.reading import readable
from snapshot.disk.reference import WEIGHTS, BaseReference
from snapshot.errors import SnapshotError
from store.client import Hub
from store.remote import RemoteFile
from store.retries import with_retries

OWN_BASE = "base"
"""In a run's directory: the base of its snapshots."""
ELSEWHERE = (
    "A run keeps its base there and changes nothing that it finds: move it away, or give the run "
    "another run.name."
)


def open_reference(
    base: BaseReference, where: Path, timeout: float, instead: str | None = None
) -> Base:
    """The base of the snapshot at `where`, verified. `instead` is a folder that may hold it, too.

    Raises SnapshotError if it is not there or has changed, HubError if it cannot be downloaded.
    """
    weights = {name: RemoteFile(*entry) for name, entry in base.files.items()}
    label = base.name if base.commit is None else f"{base.name}@{base.commit[:12]}"
    key = f"{where} holds only the trained weights. Its base {label}"
    if base.commit is not None:
        hub = Hub(base.name, timeout)
        commit, first = base.commit, next(iter(weights))
        with naming(key):
            folder = with_retries(hub, lambda: hub.download(commit, first, None)).parent
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
        f"{key} is missing. Name the folder that it is in now: a resume takes "
        "model.pretrained=<folder>; sample.py, evaluate.py and snapshot merge --base <folder>."
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
    and any other folder stays where it is. What lies in the run's directory already stays as it is.
    Raises SnapshotError if that is another model, and OSError.
    """
    own = run_dir.absolute() / OWN_BASE
    if base.repo is not None or (own.exists() and own.samefile(base.folder)):
        return base
    if own.is_symlink():  # the folder behind it is somebody else's
        raise SnapshotError(f"{own} is a link, and {base.name} would be kept there. {ELSEWHERE}")
    wanted = [path for path in base.folder.iterdir() if _is_of_model(path.name)]
    missing = [path for path in wanted if not _is_kept(path, own / path.name)]
    is_new = not own.exists()
    own.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    for path in missing:
        try:
            os.link(path.resolve(), own / path.name)
        except OSError:
            if SNAPSHOT_NAME.fullmatch(base.folder.name) is None:
                for one in made:
                    one.unlink()
                if is_new:
                    own.rmdir()
                return base
            copy = own / f"{TEMPORARY_PREFIX}{path.name}"  # a kill must not leave half a model
            copy.unlink(missing_ok=True)
            shutil.copyfile(path, copy)
            copy.rename(own / path.name)
        made.append(own / path.name)
    return replace(base, folder=own)


def _is_of_model(name: str) -> bool:
    return WEIGHTS.fullmatch(name) is not None or name in SMALL_FILES


def _is_kept(path: Path, kept: Path) -> bool:
    """Whether a file is kept already. Raises SnapshotError if there is another one of its name."""
    if not os.path.lexists(kept):
        return False
    if kept.is_file() and (kept.samefile(path) or filecmp.cmp(kept, path, shallow=False)):
        return True
    raise SnapshotError(f"{kept} is not the file of {path.parent}. {ELSEWHERE}")
