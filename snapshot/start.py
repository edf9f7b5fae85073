"""Which snapshot an attempt begins from: none, the run's own newest, or a named one."""

from __future__ import annotations

import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from data.public_names import public_resume
from snapshot.config_values import value_of
from snapshot.disk.checking import check_snapshot
from snapshot.disk.files import (
    TEMPORARY_PREFIX,
    expanded,
    folder_name,
    manifest_sha256,
    newest_verified,
    snapshot_folders,
    snapshots_in,
    visible,
)
from snapshot.disk.pruning import remove_leftovers
from snapshot.disk.state import RunState, read_state
from snapshot.errors import DiskFault, OtherRun, SnapshotError
from snapshot.run_store import (
    Fetch,
    RemoteSnapshot,
    RunStore,
    StateCheck,
    checked,
    fetch_newer,
    fetch_newest,
    open_repo,
    skipped,
    with_newest,
)
from store.errors import StoreError, StoreUnreachable
from store.fetch import PARTIAL, Contents, NoneWhole, fetch
from store.kinds import named_store
from store.latest import Latest, remote_step

METRICS = "metrics.jsonl"
"""In a run's directory: the metrics of its steps."""
ORIGIN = f"{TEMPORARY_PREFIX}origin"
"""The temporary folder for another run's snapshot, until this run has loaded its weights."""


@dataclass(frozen=True)
class Start:
    """Where an attempt begins: at a snapshot, or at step 0."""

    folder: Path | None
    """The verified snapshot; None if the run starts from scratch."""
    state: RunState | None
    reason: str
    """Which snapshot and why, for the header."""
    warnings: tuple[str, ...] = ()
    """Problems with newer snapshots that were skipped, and with the Hub."""
    fetched: bool = False
    """Whether the snapshot was downloaded from the run's own repo."""
    remote: RemoteSnapshot | None = None
    """The same snapshot on the Hub, for machines that do not have it."""
    repo: Contents | None = None
    """The run's own repo as it was at the start; None if it could not be read."""

    @property
    def known_latest(self) -> Latest | None:
        """`latest.json` of the run's own repo; None if there is none, or it could not be read."""
        return None if self.repo is None else self.repo.latest

    @property
    def is_whole(self) -> bool:
        """False if `folder` has no more yet than what `fetch_small` has downloaded."""
        return self.folder is None or PARTIAL not in self.folder.parts

    def is_in(self, run_dir: Path) -> bool:
        """Whether it is a snapshot of the run in `run_dir`, and not one of another run."""
        return self.folder is not None and self.folder.parent == snapshots_in(run_dir)

    @property
    def permanent_folder(self) -> Path | None:
        """`folder`, unless it is a temporary download that another run starts from."""
        temporary = self.folder is not None and self.folder.parent.name.startswith(TEMPORARY_PREFIX)
        return None if temporary else self.folder


def choose_start(
    run_dir: Path,
    resume: str,
    store: RunStore | None = None,
    timeout: float = 60.0,
    refuse: StateCheck = lambda state: None,
    fetch: Fetch = fetch,
) -> Start:
    """The start that `snapshot.resume` (auto, a folder or a repo) means for this run.

    `store` is the run's own repo. `timeout` is that of requests to a named repo, in seconds.
    `refuse` raises OtherRun for a state before its snapshot is downloaded by `fetch`: all of it, or
    first what describes it.

    Only the process that writes to `run_dir` may call this: it removes what a killed process left.

    Raises SnapshotError if the start would lose or mix runs: a named snapshot is damaged, no
    snapshot of the run verifies, or the directory or the repo holds another run. Raises
    StoreError if the run cannot begin without the Hub.
    """
    root = snapshots_in(run_dir)
    remove_leftovers(root)
    fetch = checked(fetch, refuse)
    start = _own_newest(root, store, fetch)
    # If an earlier attempt of this command began there, the named snapshot may be gone.
    if resume != "auto" and _began_from(start.state) != public_resume(resume):
        named = _named_snapshot(resume, root, timeout, fetch)
        start = _branch(start, named, run_dir, resume)
    if start.state is not None:
        refuse(start.state)
    return start


def has_steps(run_dir: Path) -> bool:
    """Whether a run has recorded metrics in its directory, with or without snapshots."""
    with suppress(OSError):
        return (run_dir / METRICS).stat().st_size > 0
    return False


def _own_newest(root: Path, store: RunStore | None, fetch: Fetch) -> Start:
    """The newest whole snapshot of this run, on this disk or in its repo."""
    newest, faults = newest_verified(root, check_snapshot)
    state = None if newest is None else read_state(newest)
    if store is None:
        start = Start(newest, state, f"{newest}, the newest of this run", skipped(faults))
    else:
        start = newest_of_disk_and_repo(store, newest, state, root, skipped(faults), fetch)
    if start.folder is not None:
        return start
    if faults:
        raise SnapshotError(
            f"none of the {len(faults)} snapshots in {root} is whole: {faults[0].rstrip('.')}. "
            f"Restore one from a copy, or move {root.parent} away to start over."
        )
    if has_steps(root.parent):
        start = replace(start, warnings=(*start.warnings, _without_snapshots(root)))
    return replace(start, reason="the beginning: no snapshot yet")


def _without_snapshots(root: Path) -> str:
    """A warning for a run that has steps but no snapshot: it was killed before the first one.

    Raises SnapshotError if even the snapshot folder is missing: a run creates it before step 1.
    """
    if not root.exists():
        raise SnapshotError(
            f"{root.parent} has the {METRICS} of a run, but its snapshots are gone: there is no "
            f"{root}. Restore that from a copy, or move {root.parent} away to start over."
        )
    return (
        f"{root.parent / METRICS} has steps, but {root} has no snapshot: the run begins again at "
        "step 1."
    )


def newest_of_disk_and_repo(
    store: RunStore,
    newest: Path | None,
    state: RunState | None,
    root: Path,
    warnings: tuple[str, ...],
    fetch: Fetch = fetch,
) -> Start:
    """The newer of two snapshots: the newest on this disk, and the repo's, downloaded to `root`.

    With `store.for_all` it is the repo's newest, because other machines can have no other; one that
    only this disk has is uploaded first. Raises SnapshotError if the repo holds something else, or
    if neither has a whole snapshot but the repo should; StoreError if this disk has no snapshot and
    the Hub cannot tell whether it has, or if that upload fails; what `fetch` raises for the
    snapshot of another run.
    """
    can_do_without = newest is not None and not store.for_all
    repo, faults = open_repo(store, can_do_without)
    warnings += faults
    if store.for_all and repo is not None and newest is not None and state is not None:
        repo = with_newest(store, repo, newest, state)
        newest, state = _also_in_repo(newest, state, repo, root)
    local = Start(newest, state, f"{newest}, the newest of this run", warnings, repo=repo)
    latest, local_step = local.known_latest, -1 if state is None else state.step
    if repo is None or latest is None:
        return local
    if state is not None and latest.run_id != state.run_id:
        if store.takeover:
            return local
        raise SnapshotError(
            f"{store.key} holds another run than {root.parent}, at step {latest.step}. To continue "
            "the local run, name another repo, or replace what this one holds with "
            "hub.takeover=true; to continue the run in the repo, give another run.name (and "
            "run.dir, if that is set)."
        )
    if newest is not None and latest.step <= local_step:
        same = latest.manifest_sha256 == manifest_sha256(newest)
        return replace(
            local,
            reason=f"{local.reason}; {store.store.name} has step {latest.step}",
            remote=RemoteSnapshot.of(repo, latest.folder) if same else None,
        )
    try:
        found = fetch_newer(repo, local_step, root, fetch)
    except NoneWhole as error:
        if newest is None:
            fault = f"{str(error).rstrip('.')}. Start again in another repo."
            raise SnapshotError(fault) from error
        return replace(local, warnings=warnings + skipped(error.faults))
    except (StoreError, DiskFault) as error:
        if not can_do_without:
            raise
        fault = f"step {latest.step} of {repo.name} could not be fetched: {str(error).rstrip('.')}."
        return replace(local, warnings=(*warnings, fault))
    why = "there is none here" if newest is None else f"newer than step {local_step} here"
    if store.for_all:
        why = "the newest that all machines can have"
    return Start(
        found.path,
        read_state(found.path),
        f"{found.path}, fetched from {found.repo.name}: {why}",
        warnings + skipped(found.faults),
        fetched=True,
        remote=RemoteSnapshot.of(found.repo, found.folder),
        repo=found.repo,
    )


def _also_in_repo(
    newest: Path, state: RunState, repo: Contents, root: Path
) -> tuple[Path | None, RunState | None]:
    """The newest snapshot of the repo if this disk has it, too; the run of another repo stays."""
    latest = repo.latest
    if latest is None or latest.run_id != state.run_id:
        return newest, state
    for folder in (newest, root / folder_name(latest.step)):
        with suppress(SnapshotError, OSError):
            if manifest_sha256(folder) == latest.manifest_sha256:
                return folder, check_snapshot(folder)
    return None, None


def _began_from(state: RunState | None) -> object:
    """What `snapshot.resume` was when the run began."""
    return None if state is None else value_of(state.config, "snapshot.resume")


def _named_snapshot(resume: str, root: Path, timeout: float, fetch: Fetch) -> Start:
    path = visible(expanded(resume))
    remote = None if path.exists() else named_store(resume, timeout)
    if not path.exists() and remote is None:
        raise SnapshotError(
            f"snapshot.resume={resume} must be auto, a folder that exists, a repo of the "
            "Hub (owner/name or owner/name@revision) or a bucket (hf://buckets/owner/name)."
        )
    try:
        if remote is None:
            folder = newest_snapshot(path)
            return Start(folder, read_state(folder), f"{folder}, as snapshot.resume asks")
        found = fetch_newest(*remote, root / ORIGIN, fetch)
    except (OtherRun, DiskFault):
        raise
    except StoreUnreachable as error:
        raise StoreUnreachable(
            f"snapshot.resume={resume}: {str(error).rstrip('.')}. Start again when the Hub can "
            "be reached."
        ) from error
    except (SnapshotError, StoreError) as error:
        raise SnapshotError(
            f"snapshot.resume={resume}: {str(error).rstrip('.')}. Name a snapshot that is whole, "
            "a run's folder, or its repo."
        ) from error
    return Start(
        found.path,
        read_state(found.path),
        f"{resume}, step {remote_step(found.folder)}, as snapshot.resume asks",
        skipped(found.faults),
        remote=RemoteSnapshot.of(found.repo, found.folder),
    )


def _branch(own: Start, named: Start, run_dir: Path, resume: str) -> Start:
    """A new run from the named snapshot, or this run's newest if that started from it before.

    Raises SnapshotError if the run has other snapshots.
    """
    assert named.folder is not None
    assert named.state is not None
    origin = manifest_sha256(named.folder)
    if own.folder is None:
        named.state.origin, named.state.run_id = origin, uuid.uuid4().hex
        return replace(named, warnings=own.warnings + named.warnings, repo=own.repo)
    assert own.state is not None
    if own.state.origin == origin or manifest_sha256(own.folder) == origin:
        return own
    relation = (
        f"is already further, at step {own.state.step}"
        if own.state.run_id == named.state.run_id
        else f"already holds another run, at step {own.state.step}"
    )
    where = run_dir if own.repo is None or own.remote is None else own.repo.store.key
    remedy = "To start a new run there, give it another run.name (and run.dir, if that is set)"
    if own.repo is not None:  # which has the newer snapshots as well, and a start fetches them
        remedy += f", and another {own.repo.store.key.partition('=')[0]}"
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
