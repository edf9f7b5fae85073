"""Which snapshot an attempt starts from: none, the run's own newest, or a named one."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.public_names import public_config, public_resume
from snapshot.config_values import value_of
from snapshot.disk.files import (
    TEMPORARY_PREFIX,
    folder_name,
    manifest_sha256,
    newest_verified,
    remove_leftovers,
    snapshot_folders,
    snapshots_in,
)
from snapshot.disk.reading import visible
from snapshot.disk.state import RunState, check_snapshot, read_state
from snapshot.errors import DiskFault, OtherRun, SnapshotError
from snapshot.fetched import fetch_newest, remote_snapshot, skipped
from snapshot.start import Start, StateCheck, any_state
from snapshot.start_over import (
    METRICS,
    RESUMES_INSTEAD,
    has_steps,
    newest_state,
    start_over,
)
from snapshot.store import Store, newest_of_disk_and_repo
from store.errors import HubError, HubUnreachable
from store.latest import remote_step
from store.names import named_remote

ATTEMPTS = "attempts.txt"
"""In a run's directory: the ids of the attempts that ran there, to compare with latest.json."""
ORIGIN = f"{TEMPORARY_PREFIX}origin"
"""The temporary folder for another run's snapshot, until this run has loaded its weights."""


def choose_start(
    run_dir: Path,
    resume: str,
    store: Store | None = None,
    use_local: bool = True,
    timeout: float = 60.0,
    is_restart: Callable[[RunState | None], bool] = lambda state: False,
    refuse: StateCheck = any_state,
) -> Start:
    """The start that `snapshot.resume` (auto, never, a folder or a repo) means for this run.

    `store` is the run's own repo. With `use_local` false, snapshots on this disk are ignored.
    `timeout` is that of requests to a named repo, in seconds. `never` starts over once: if the same
    command began the run of a state, and that run has not ended (`is_restart`), it resumes; one
    without a state begins again.
    `refuse` raises OtherRun for a state before the rest of its snapshot is downloaded.

    Only the process that writes to `run_dir` may call this: it removes what a killed process left.

    Raises SnapshotError if the start would lose or mix runs: a named snapshot is damaged, no
    snapshot of the run verifies, or the directory or the repo holds another run. Raises HubError if
    the run cannot begin without the Hub.
    """
    root = snapshots_in(run_dir)
    remove_leftovers(root)
    if resume == "never":
        state = newest_state(root, store, use_local)
        again = is_restart(state)
        if state is None or not again:
            return start_over(run_dir, root, store, again)
        try:
            own = _own_newest(root, store, use_local, refuse)
        except SnapshotError:  # no snapshot is whole, so a resume would also start from scratch
            return start_over(run_dir, root, store)
        return replace(own, warnings=(RESUMES_INSTEAD.format(run_dir=run_dir), *own.warnings))
    own = _own_newest(root, store, use_local, refuse)
    if resume == "auto":
        return own
    if own.state is not None and _began_from(own.state) == public_resume(resume):
        return own  # an earlier attempt of this command started there; the named one may be gone
    return _branch(own, _named_snapshot(resume, root, timeout, store, refuse), run_dir, resume)


def _began_from(state: RunState) -> Any:
    """What `snapshot.resume` was when the run began."""
    return value_of(public_config(state.config), "snapshot.resume")


def _branch(own: Start, named: Start, run_dir: Path, resume: str) -> Start:
    """A new run from the named snapshot, or this run's newest if that started from it before.

    Raises SnapshotError if the run has other snapshots.
    """
    assert named.folder is not None
    assert named.state is not None
    origin = manifest_sha256(named.folder)
    if own.folder is None:
        named.state.origin, named.state.run_id = origin, uuid.uuid4().hex
        return replace(
            named,
            warnings=own.warnings + named.warnings,
            repo=own.repo,
            ended_attempts=own.ended_attempts,
        )
    assert own.state is not None
    if own.state.origin == origin or manifest_sha256(own.folder) == origin:
        return own
    relation = (
        f"is already further, at step {own.state.step}"
        if own.state.run_id == named.state.run_id
        else f"already holds another run, at step {own.state.step}"
    )
    where = run_dir if own.repo is None or own.remote is None else own.repo.hub.key
    remedy = "To start a new run there, give it another run.name (and run.dir, if that is set)"
    if own.repo is not None:  # which has the newer snapshots as well, and a start fetches them
        remedy += f", and another {own.repo.hub.key.partition('=')[0]}"
    elif own.state.run_id == named.state.run_id:
        remedy += (
            ". To return to that step in this run, remove its newer snapshots from "
            f"{snapshots_in(run_dir)} and leave snapshot.resume out"
        )
    raise SnapshotError(f"snapshot.resume={resume}, but {where} {relation}. {remedy}.")


def newest_snapshot(path: Path) -> Path:
    """The snapshot at `path`, or the newest verified one of the run at `path`.

    Raises SnapshotError if there is none.
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
    """The folder that `newest_snapshot(path)` returns, if its step is `step`; reads no file."""
    for root in (snapshots_in(path), path):
        if (root / folder_name(step)).is_dir():
            return root / folder_name(step)
    return path


def _named_snapshot(
    resume: str, root: Path, timeout: float, store: Store | None, refuse: StateCheck
) -> Start:
    path = visible(Path(resume).expanduser())
    remote = None if path.exists() else named_remote(resume, timeout)
    if remote is not None and store is not None:
        remote[0].waiting = store.hub.waiting  # one limit for all questions of a start
    if not path.exists() and remote is None:
        raise SnapshotError(
            f"snapshot.resume={resume} must be auto, never, a folder that exists, a repo of the "
            "Hub (owner/name or owner/name@revision) or a bucket (hf://buckets/owner/name)."
        )
    try:
        if remote is None:
            folder = newest_snapshot(path)
            return Start(folder, read_state(folder), f"{folder}, as snapshot.resume asks")
        found = fetch_newest(*remote, root / ORIGIN, refuse)
    except (OtherRun, DiskFault):
        raise
    except HubUnreachable as error:
        raise HubUnreachable(
            f"snapshot.resume={resume}: {str(error).rstrip('.')}. Start again when the Hub can "
            "be reached."
        ) from error
    except (SnapshotError, HubError) as error:
        raise SnapshotError(
            f"snapshot.resume={resume}: {str(error).rstrip('.')}. Name a snapshot that is whole, "
            "a run's folder, or its repo."
        ) from error
    reason = f"{resume}, step {remote_step(found.folder)}, as snapshot.resume asks"
    place = remote_snapshot(found.repo, found.folder)
    state = read_state(found.path)
    return Start(found.path, state, reason, skipped(found.faults), remote=place)


def _own_newest(root: Path, store: Store | None, use_local: bool, refuse: StateCheck) -> Start:
    """The newest whole snapshot of this run, on this disk or in its repo."""
    newest, faults = newest_verified(root, check_snapshot) if use_local else (None, [])
    state = None if newest is None else read_state(newest)
    warnings = tuple(f"{fault.rstrip('.')}; skipped." for fault in faults)
    if store is None:
        start = Start(newest, state, f"{newest}, the newest of this run", warnings)
    else:
        ended = _recorded_attempts(root.parent)
        start = newest_of_disk_and_repo(store, newest, state, root, warnings, refuse)
        start = replace(start, ended_attempts=ended)
    if start.folder is None and faults:
        raise SnapshotError(
            f"none of the {len(faults)} snapshots in {root} is whole: {faults[0].rstrip('.')}. "
            "Restore one from a copy, or start over with snapshot.resume=never (the existing run "
            "is moved aside, not deleted)."
        )
    if start.folder is None:
        if use_local and has_steps(root.parent):
            start = replace(start, warnings=(*start.warnings, _without_snapshots(root)))
        return replace(start, reason="the beginning: no snapshot yet")
    return start


def _without_snapshots(root: Path) -> str:
    """A warning for a run that has steps but no snapshot: it was killed before the first one.

    Raises SnapshotError if even the snapshot folder is missing: a run creates it before step 1.
    """
    if not root.exists():
        raise SnapshotError(
            f"{root.parent} has the {METRICS} of a run, but its snapshots are gone: there is no "
            f"{root}. Restore that from a copy, or start over with snapshot.resume=never (the "
            "existing run is moved aside, not deleted)."
        )
    return (
        f"{root.parent / METRICS} has steps, but {root} has no snapshot: the run begins again at "
        "step 1."
    )


def record_attempt(run_dir: Path, attempt_id: str) -> None:
    """Record that an attempt uploads from this directory."""
    with suppress(OSError), open(run_dir / ATTEMPTS, "a", encoding="utf-8") as opened:
        opened.write(f"{attempt_id}\n")


def _recorded_attempts(run_dir: Path) -> frozenset[str]:
    """The attempts that ran here. They are over: one process at a time trains in a directory."""
    try:
        return frozenset((run_dir / ATTEMPTS).read_text(encoding="utf-8").split())
    except (OSError, ValueError):
        return frozenset()
