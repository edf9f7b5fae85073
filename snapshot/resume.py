"""Where a run starts: from nothing, from its own newest snapshot, or from one that is named."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapshot.errors import SnapshotError
from snapshot.files import (
    folder_name,
    identity,
    newest_verified,
    remove_leftovers,
    snapshot_folders,
)
from snapshot.state import RunState, check_snapshot, read_state

MUST_MATCH = (
    "data.block_size",
    "model.n_layer",
    "model.n_head",
    "model.n_embd",
    "train.global_batch_size",
    "train.seed",
)
"""Keys that make the global batches or the weights' shapes: another value is another run."""


@dataclass(frozen=True)
class Start:
    """What a run goes on from."""

    folder: Path | None
    """The verified snapshot; None for a run from the beginning."""
    state: RunState | None
    reason: str
    """Which snapshot and why, for the header."""
    warnings: tuple[str, ...] = ()
    """What is wrong with newer snapshots that were passed over."""


def snapshots_in(run_dir: Path) -> Path:
    """Where a run keeps its snapshots."""
    return run_dir / "snapshots"


def choose_start(run_dir: Path, resume: str) -> Start:
    """What `snapshot.resume` (auto, never, or a folder) means for this run directory.

    Only the one process that writes in `run_dir` may call this: it clears what a killed one left.
    Raises SnapshotError when that would lose or mix something: a named snapshot that is damaged, a
    run of which no snapshot verifies, a directory that holds another run.
    """
    root = snapshots_in(run_dir)
    remove_leftovers(root)
    if resume == "never":
        return _start_over(run_dir)
    own = _own_newest(root)
    if resume == "auto":
        return own
    named, state = _named_snapshot(resume)
    origin = identity(named)
    if own.folder is None:
        state.origin, state.run_id = origin, uuid.uuid4().hex
        return Start(named, state, f"{named}, as snapshot.resume asks", own.warnings)
    assert own.state is not None
    if own.state.origin == origin or identity(own.folder) == origin:
        return own  # this run did start from it, and has come further
    relation = (
        f"is already further, at step {own.state.step}"
        if own.state.run_id == state.run_id
        else f"already holds another run, at step {own.state.step}"
    )
    raise SnapshotError(
        f"snapshot.resume={resume}, but {run_dir} {relation}. Give the new run another run.name; "
        f"to go back in this one, remove its newer snapshots from {root} and leave "
        "snapshot.resume=auto."
    )


def refuse_other_run(state: RunState, config: dict[str, Any], data: dict[str, Any]) -> None:
    """Raise SnapshotError with all differences that make this another run than the snapshot's."""
    differences = [
        f"{key}: {before} in the snapshot, {now} now"
        for key in MUST_MATCH
        if (before := value_of(state.config, key)) != (now := value_of(config, key))
    ]
    if state.data.get("vocabulary") != data["vocabulary"]:
        differences.append(
            f"vocabulary: {state.data.get('vocabulary')} characters in the snapshot, "
            f"{data['vocabulary']} now"
        )
    if state.data.get("fingerprint") != data["fingerprint"]:
        differences.append(
            f"text: {state.data.get('name')} ({str(state.data.get('fingerprint'))[:8]}) in the "
            f"snapshot, {data['name']} ({data['fingerprint'][:8]}) now, "
            "or another data.val_fraction"
        )
    if differences:
        raise SnapshotError(
            f"the snapshot of step {state.step} belongs to another run:\n  "
            + "\n  ".join(differences)
            + "\nRestore these values, or give the new run another run.name."
        )


def value_of(config: dict[str, Any], key: str) -> Any:
    """The value of a dotted key in nested dictionaries; None where there is none."""
    for name in key.split("."):
        config = config.get(name, {}) if isinstance(config, dict) else {}
    return None if config == {} else config


def newest_of(path: Path) -> Path:
    """The snapshot that a path means: itself, or the newest verified one of a run's directory.

    Raises SnapshotError when there is none.
    """
    for root in (snapshots_in(path), path):
        if snapshot_folders(root):
            newest, faults = newest_verified(root, check_snapshot)
            if newest is None:
                raise SnapshotError(f"{path} has no whole snapshot: {'; '.join(faults)}")
            return newest
    check_snapshot(path)
    return path


def folder_for_step(path: Path, step: int) -> Path:
    """Where `newest_of(path)`, known to be of `step`, lies; nothing is read."""
    for root in (snapshots_in(path), path):
        if (root / folder_name(step)).is_dir():
            return root / folder_name(step)
    return path


def _named_snapshot(resume: str) -> tuple[Path, RunState]:
    path = Path(resume).expanduser()
    if not path.exists():
        raise SnapshotError(
            f"snapshot.resume={resume} is neither auto, never, nor a folder that exists."
        )
    try:
        folder = newest_of(path)
        return folder, read_state(folder)
    except SnapshotError as error:
        raise SnapshotError(
            f"snapshot.resume={resume}: {error}. Name a snapshot that is whole, or a run's folder."
        ) from error


def _own_newest(root: Path) -> Start:
    newest, faults = newest_verified(root, check_snapshot)
    warnings = tuple(f"{fault}; passed over." for fault in faults)
    if newest is not None:
        state = read_state(newest)
        return Start(newest, state, f"{newest}, the newest of this run", warnings)
    if faults:
        raise SnapshotError(
            f"none of the {len(faults)} snapshots in {root} is whole: {faults[0]}. "
            "Restore one from a copy, or start over with snapshot.resume=never (what is there is "
            "moved aside, not deleted)."
        )
    return Start(None, None, "the beginning: no snapshot yet")


def _start_over(run_dir: Path) -> Start:
    """Move what is in the run's directory aside; nothing is deleted."""
    if not (run_dir / "metrics.jsonl").exists() and not snapshot_folders(snapshots_in(run_dir)):
        return Start(None, None, "the beginning, as snapshot.resume=never asks")
    place = run_dir.resolve()  # through a link: it is the folder that moves
    number = 1
    while (aside := place.with_name(f"{place.name}.old-{number}")).exists():
        number += 1
    try:
        place.rename(aside)
    except OSError as error:
        raise SnapshotError(
            f"snapshot.resume=never, but {run_dir} cannot be moved to {aside}: {error.strerror}. "
            "Move what is in it yourself, or give the run another run.dir."
        ) from error
    return Start(
        None, None, f"the beginning, as snapshot.resume=never asks; the earlier run is now {aside}"
    )
