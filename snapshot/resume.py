"""Where a run starts: from nothing, from its own newest snapshot, or from one that is named."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from snapshot.disk.files import (
    TEMPORARY_PREFIX,
    folder_name,
    identity,
    newest_verified,
    remove_leftovers,
    snapshot_folders,
)
from snapshot.disk.reading import visible
from snapshot.disk.state import RunState, check_snapshot, read_state
from snapshot.errors import SnapshotError
from snapshot.hub.client import Hub
from snapshot.hub.errors import HubError, HubUnreachable
from snapshot.hub.fetch import remote_step
from snapshot.hub.names import named_repo
from snapshot.start import Start
from snapshot.start_over import GOES_ON, METRICS, start_over, state_at_hand
from snapshot.store import Store, fetch_newest, newest_of_both

ATTEMPTS = "attempts.txt"
"""In a run's directory: which of the attempts in its repo's latest.json ran here."""
ORIGIN = f"{TEMPORARY_PREFIX}origin"
"""Where another run's snapshot lies until this one's weights are made from it."""
MUST_MATCH = (
    "data.block_size",
    "model.n_layer",
    "model.n_head",
    "model.n_embd",
    "model.activation_function",
    "train.global_batch_size",
    "train.seed",
)
"""Keys that make the global batches or the model: another value is another run."""
FORMERLY = {"model.activation_function": "gelu_new"}
"""Values of keys that snapshots of older versions lack."""


def snapshots_in(run_dir: Path) -> Path:
    """Where a run keeps its snapshots."""
    return run_dir / "snapshots"


def choose_start(
    run_dir: Path,
    resume: str,
    store: Store | None = None,
    here: bool = True,
    timeout: float = 60.0,
    is_same_start: Callable[[RunState], bool] = lambda state: False,
) -> Start:
    """What `snapshot.resume` (auto, never, a folder or a repo) means for this run.

    `store` is the run's own repo; with `here` false, what this disk has does not count; `timeout`
    is that of requests to a named repo, in seconds. `never` starts over once: a run of which
    `is_same_start` is true, because the same command began it and it has not ended, resumes.
    Only the one process that writes in `run_dir` may call this: it clears what a killed one left.
    Raises SnapshotError when that would lose or mix something: a named snapshot that is damaged, a
    run of which no snapshot verifies, a directory or a repo that holds another run; HubError where
    the run cannot begin without the Hub.
    """
    root = snapshots_in(run_dir)
    remove_leftovers(root)
    if resume == "never":
        state = state_at_hand(root, store, here)
        if state is None or not is_same_start(state):
            return start_over(run_dir, root, store)
        try:
            own = _own_newest(root, store, here)
        except SnapshotError:  # nothing of it is whole: from the beginning it comes to the same
            return start_over(run_dir, root, store)
        return replace(own, warnings=(GOES_ON.format(run_dir=run_dir), *own.warnings))
    own = _own_newest(root, store, here)
    if resume == "auto":
        return own
    if own.state is not None and value_of(own.state.config, "snapshot.resume") == resume:
        return own  # the same words went on from there before; it may have moved since
    named = _named_snapshot(resume, root, timeout)
    assert named.folder is not None
    assert named.state is not None
    origin = identity(named.folder)
    if own.folder is None:
        named.state.origin, named.state.run_id = origin, uuid.uuid4().hex
        return replace(
            named,
            warnings=own.warnings + named.warnings,
            seen=own.seen,
            hub_is_known=own.hub_is_known,
            ended=own.ended,
        )
    assert own.state is not None
    if own.state.origin == origin or identity(own.folder) == origin:
        return own  # this run did start from it, and has come further
    relation = (
        f"is already further, at step {own.state.step}"
        if own.state.run_id == named.state.run_id
        else f"already holds another run, at step {own.state.step}"
    )
    where = run_dir if own.place is None else f"hub.repo_id={own.place.repo_id}"
    raise SnapshotError(
        f"snapshot.resume={resume}, but {where} {relation}. Give the new run another run.name "
        "(and another hub.repo_id); to go back in this one, remove its newer snapshots from "
        f"{root} and leave snapshot.resume=auto."
    )


def refuse_other_run(state: RunState, config: dict[str, Any], data: dict[str, Any]) -> None:
    """Raise SnapshotError with all differences that make this another run than the snapshot's."""
    differences = [
        f"{key}: {typed(before)} in the snapshot, {typed(now)} now"
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
            + "\nRestore these values, or give the new run another run.name (and hub.repo_id)."
        )


def value_of(config: dict[str, Any], key: str) -> Any:
    """The value of a dotted key in nested dictionaries; where it is absent, FORMERLY's, or None."""
    found: Any = config
    for name in key.split("."):
        if not isinstance(found, dict) or name not in found:
            return FORMERLY.get(key)
        found = found[name]
    return found


def typed(value: Any) -> str:
    """A value of the configuration as the command line takes it: null, true, 0.1, a text."""
    return value if isinstance(value, str) else json.dumps(value)


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


def _named_snapshot(resume: str, root: Path, timeout: float) -> Start:
    path = visible(Path(resume).expanduser())
    repo = None if path.exists() else named_repo(resume)
    if not path.exists() and repo is None:
        raise SnapshotError(
            f"snapshot.resume={resume} is neither auto, never, nor a folder that exists, nor a "
            "repo of the Hub (owner/name or owner/name@revision)."
        )
    try:
        if repo is None:
            folder = newest_of(path)
            return Start(folder, read_state(folder), f"{folder}, as snapshot.resume asks")
        found = fetch_newest(Hub(repo[0], timeout), repo[1], root / ORIGIN)
    except HubUnreachable as error:
        raise HubUnreachable(
            f"snapshot.resume={resume}: {str(error).rstrip('.')}. Start again when it can be."
        ) from error
    except (SnapshotError, HubError) as error:
        raise SnapshotError(
            f"snapshot.resume={resume}: {str(error).rstrip('.')}. Name a snapshot that is whole, "
            "a run's folder, or its repo."
        ) from error
    assert found.path is not None
    assert found.place is not None
    reason = f"{resume}, step {remote_step(found.place.folder)}, as snapshot.resume asks"
    return Start(found.path, read_state(found.path), reason, found.faults, found.place)


def _own_newest(root: Path, store: Store | None, here: bool) -> Start:
    """The newest snapshot of this run that is whole, here or in its repo."""
    newest, faults = newest_verified(root, check_snapshot) if here else (None, [])
    state = None if newest is None else read_state(newest)
    warnings = tuple(f"{fault.rstrip('.')}; passed over." for fault in faults)
    if store is None:
        local = Start(newest, state, f"{newest}, the newest of this run", warnings)
    else:
        ended = _attempts_in(root.parent)
        local = newest_of_both(store, newest, state, root, warnings)
        local = replace(local, ended=ended)
    if local.folder is None and faults:
        raise SnapshotError(
            f"none of the {len(faults)} snapshots in {root} is whole: {faults[0].rstrip('.')}. "
            "Restore one from a copy, or start over with snapshot.resume=never (what is there is "
            "moved aside, not deleted)."
        )
    if local.folder is None:
        if here and has_steps(root.parent):
            local = replace(local, warnings=(*local.warnings, _without_snapshots(root)))
        return replace(local, reason="the beginning: no snapshot yet")
    return local


def has_steps(run_dir: Path) -> bool:
    """Whether a run has taken steps in its directory, whatever became of its snapshots."""
    with suppress(OSError):
        return (run_dir / METRICS).stat().st_size > 0
    return False


def _without_snapshots(root: Path) -> str:
    """A warning for a run with steps and no snapshot, as one killed before its first leaves it.

    Raises SnapshotError where not even their folder is there: it is made before the first step.
    """
    if not root.exists():
        raise SnapshotError(
            f"{root.parent} has the {METRICS} of a run, but its snapshots are gone: there is no "
            f"{root}. Restore that from a copy, or start over with snapshot.resume=never (what is "
            "there is moved aside, not deleted)."
        )
    return (
        f"{root.parent / METRICS} has steps, but {root} has no snapshot: the run begins again at "
        "step 1."
    )


def note_attempt(run_dir: Path, attempt_id: str) -> None:
    """Note that an attempt begins to upload from this directory."""
    with suppress(OSError), open(run_dir / ATTEMPTS, "a", encoding="utf-8") as opened:
        opened.write(f"{attempt_id}\n")


def _attempts_in(run_dir: Path) -> frozenset[str]:
    """The attempts that ran here. They are over: one process at a time trains in a directory."""
    try:
        return frozenset((run_dir / ATTEMPTS).read_text(encoding="utf-8").split())
    except (OSError, ValueError):
        return frozenset()
