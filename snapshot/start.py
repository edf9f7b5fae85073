"""Which snapshot an attempt begins from: none, the run's own newest, or a named one."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from common.retries import with_retries
from data.public_names import public_resume
from snapshot.config_values import value_of
from snapshot.disk.checking import check_snapshot
from snapshot.disk.folder import (
    LARGEST_STEP,
    TEMPORARY_PREFIX,
    manifest_sha256,
    newest_verified,
    remove_leftovers,
    snapshot_folders,
    snapshots_in,
)
from snapshot.disk.state import RunState, read_state
from snapshot.errors import DiskFault, SnapshotError
from snapshot.source import find, naming
from store.attempt import Attempt, Card, Upload, UploadTarget
from store.errors import (
    StoreError,
    StoreMissing,
    StoreMoved,
    StoreRefused,
    StoreUnreachable,
)
from store.fence import Fenced
from store.fetch import Fetched, NoneWhole, StateCheck, fetch_newest, read_store
from store.latest import METRICS, Latest
from store.store import Contents, Store


@dataclass(frozen=True)
class RunStore:
    """The store that a run uploads to, and how it may be used."""

    store: Store
    private: bool
    takeover: bool
    for_all: bool = False
    """Whether other machines begin from it, too: their disks lack what this disk has."""


@dataclass(frozen=True)
class Start:
    """Where an attempt begins: at a snapshot, or at step 0."""

    folder: Path | None
    """The verified snapshot; None if the run starts from scratch."""
    state: RunState | None
    reason: str
    """Which snapshot and why, for the header."""
    warnings: tuple[str, ...] = ()
    """Problems with newer snapshots that were skipped, and with the store."""
    remote: str | None = None
    """The name of the same snapshot in a store, for machines that do not have it."""
    contents: Contents | None = None
    """What the run's own store held at the start; None if it could not be read."""

    @property
    def known_latest(self) -> Latest | None:
        """`latest.json` of the run's own store; None if there is none, or it was not read."""
        return None if self.contents is None else self.contents.latest

    def warned(self, *faults: str) -> Start:
        """The same with warnings, for which the full stops are left out."""
        more = tuple(f"{fault.rstrip('.')}." for fault in faults)
        return replace(self, warnings=self.warnings + more)

    def skipping(self, faults: Iterable[str]) -> Start:
        """The same with warnings about snapshots that are not whole."""
        return self.warned(*(f"{fault.rstrip('.')}; skipped" for fault in faults))

    def is_in(self, run_dir: Path) -> bool:
        """Whether it is a snapshot of the run in `run_dir`, and not one of another run."""
        return self.folder is not None and self.folder.parent == snapshots_in(run_dir)


def choose_start(
    run_dir: Path,
    resume: str,
    own: RunStore | None = None,
    timeout: float = 60.0,
    refuse: StateCheck = lambda state: None,
) -> Start:
    """The start that `snapshot.resume` (auto, or a name as for `find`) means for this run.

    `own` is the run's own store. `timeout` is that of requests to a named one, in seconds. `refuse`
    raises OtherRun for a state, before more of its snapshot is downloaded.

    Only the process that writes to `run_dir` may call this: it removes what a killed process left.

    Raises SnapshotError if the start would lose or mix runs: a named snapshot is damaged, no
    snapshot of the run verifies, or the directory or the store holds another run. Raises StoreError
    if the run cannot begin without its store.
    """
    root = snapshots_in(run_dir)
    remove_leftovers(root)
    start = _own_newest(root, own, refuse)
    # If an earlier attempt of this command began there, the named snapshot may be gone.
    began_from = None if start.state is None else value_of(start.state.config, "snapshot.resume")
    if resume != "auto" and began_from != public_resume(resume):
        start = _start_of_another(start, run_dir, resume, timeout, refuse)
    if start.state is not None:
        refuse(start.state)
    return start


def has_steps(run_dir: Path) -> bool:
    """Whether a run has recorded more in its directory than that it began."""
    with suppress(OSError), open(run_dir / METRICS, "rb") as opened:
        return any(line.startswith(b'{"event": ') for line in opened)
    return False


def _own_newest(root: Path, own: RunStore | None, refuse: StateCheck) -> Start:
    """The newest whole snapshot of this run, on this disk or in its store."""
    newest, faults = newest_verified(snapshot_folders(root), check_snapshot)
    state = None if newest is None else read_state(newest)
    start = Start(newest, state, f"{newest}, the newest of this run").skipping(faults)
    if own is not None:
        start = newest_of_disk_and_store(own, start, root, refuse)
    if start.folder is not None:
        return start
    remedy = f"Restore one from a copy, or move {root.parent} away to start over."
    if faults:
        raise SnapshotError(
            f"none of the {len(faults)} snapshots in {root} is whole: {faults[0].rstrip('.')}. "
            f"{remedy}"
        )
    start = replace(start, reason="the beginning: no snapshot yet")
    if not has_steps(root.parent):
        return start
    what = f"{root.parent / METRICS} has steps, but there is no snapshot in {root}"
    if not root.exists():  # a run creates it before step 1
        raise SnapshotError(f"{what}. {remedy}")
    return start.warned(f"{what}: the run begins again at step 1")


def newest_of_disk_and_store(
    own: RunStore,
    local: Start,
    root: Path,
    refuse: StateCheck | None = None,
) -> Start:
    """The newer of `local`, the newest on this disk, and the store's, downloaded to `root`.

    With `own.for_all`, what only this disk has is uploaded, for other machines. Raises
    SnapshotError if the store holds something else, or if neither has a whole snapshot but the
    store should; StoreError if this disk has no snapshot and it is unknown whether the store has,
    or if that upload fails; what `refuse` raises.
    """
    can_do_without = local.folder is not None and not own.for_all
    try:
        contents = with_retries(lambda: _read_or_create(own))
    except StoreError as error:
        if can_do_without:
            return local.warned(f"{str(error).rstrip('.')}. The run continues without it")
        if isinstance(error, StoreRefused):
            raise
        raise StoreUnreachable(
            f"{error}: it is unknown whether {own.store.name} holds a snapshot of this run. Start "
            "again when it can be reached; a run that is new can begin without "
            f"{own.store.key.partition('=')[0]}, which a later start may have."
        ) from error
    if own.private and not contents.private:
        raise SnapshotError(
            f"{own.store.key} is a public repo, and hub.private=true. Nothing was uploaded. "
            "Make it private, name another, or allow it with hub.private=false."
        )
    if refusal := contents.refusal():
        raise SnapshotError(refusal)
    local = replace(local, contents=contents)
    latest, state = contents.latest, local.state
    is_other = latest is not None and state is not None and latest.run_id != state.run_id
    if latest is not None and is_other and not own.takeover:
        raise SnapshotError(
            f"{own.store.key} holds another run than {root.parent}, at step {latest.step}. To "
            "continue the local run, name another store, or replace what this one holds with "
            "hub.takeover=true; to continue the run in the store, give another run.name (and "
            "run.dir, if that is set)."
        )
    step = -1 if state is None else state.step
    if latest is None or is_other or latest.step <= step:
        return _from_disk(own, local)
    try:
        found = fetch_newest(contents, root, refuse=refuse, after=step)
    except NoneWhole as error:
        if state is None:
            fault = f"{str(error).rstrip('.')}. Start again in another store."
            raise SnapshotError(fault) from error
        return _from_disk(own, local.skipping(error.faults))
    except (StoreError, DiskFault) as error:
        if not can_do_without:
            raise
        what = f"step {latest.step} of {contents.name} could not be fetched"
        return local.warned(f"{what}: {error}")
    why = "there is none here" if state is None else f"newer than step {step} here"
    fetched = _at(found, f"{found.path}, fetched from {contents.name}: {why}")
    return replace(fetched, warnings=local.warnings + fetched.warnings)


def _read_or_create(own: RunStore) -> Contents:
    store = own.store
    contents = None
    with suppress(StoreMissing):
        contents = read_store(store)
    with suppress(StoreUnreachable):  # a token that is refused is reported now, not at an upload
        store.check_token()
    if contents is None:
        store.create(own.private)
        contents = read_store(store)
    return contents


def _from_disk(own: RunStore, local: Start) -> Start:
    """`local`, and its name in the store if that has the same or other machines need it."""
    if local.folder is None or local.state is None or local.contents is None:
        return local
    digest, latest, contents = manifest_sha256(local.folder), local.known_latest, local.contents
    if own.for_all and (latest is None or latest.manifest_sha256 != digest):
        contents = _upload_for_all(own, contents, local.folder, local.state)
        latest = contents.latest
    if latest is None or latest.run_id != local.state.run_id:
        return local
    return replace(
        local,
        contents=contents,
        reason=f"{local.reason}; {own.store.name} has step {latest.step}",
        remote=contents.pinned(latest.folder) if latest.manifest_sha256 == digest else None,
    )


def _upload_for_all(own: RunStore, contents: Contents, newest: Path, state: RunState) -> Contents:
    """The contents of the store with a snapshot that only this disk has, for other machines.

    A machine may have been killed after a snapshot and before its upload. Raises StoreError if it
    cannot be uploaded.
    """
    attempt = Attempt(
        UploadTarget(
            own.store,
            state.run_id,
            uuid.uuid4().hex,
            keep=LARGEST_STEP,
            private=own.private,
            takeover=own.takeover,
            known_latest=contents.latest,
        )
    )
    upload = Upload(newest, Card(f"# Step {state.step}\n"))
    try:
        with_retries(lambda: attempt.upload(upload))
    except (Fenced, StoreMoved) as error:
        again = f"another start has uploaded to {own.store.name} meanwhile. Start again."
        raise StoreUnreachable(again, "another uploads") from error
    return with_retries(lambda: read_store(own.store))


def _at(found: Fetched, reason: str) -> Start:
    """The start at a snapshot that was found on this disk, or downloaded."""
    remote = None if found.contents is None else found.contents.pinned(found.folder)
    start = Start(found.path, read_state(found.path), reason, (), remote, found.contents)
    return start.skipping(found.faults)


def _start_of_another(
    own: Start, run_dir: Path, resume: str, timeout: float, refuse: StateCheck
) -> Start:
    """The start of a new run at a named snapshot. Raises SnapshotError if the run has its own."""
    if own.state is not None:
        store = "" if own.contents is None else f" and its store {own.contents.store.name}"
        raise SnapshotError(
            f"snapshot.resume={resume}, but {run_dir}{store} has snapshots already, up to step "
            f"{own.state.step}. To continue from there, leave snapshot.resume out. To start a new "
            "run, give it another run.name (and run.dir and store, if they are set). To return to "
            "that step, leave snapshot.resume out and remove the newer snapshots."
        )
    # Another run's snapshot is here only until this one has loaded its weights.
    place = snapshots_in(run_dir) / f"{TEMPORARY_PREFIX}origin"
    remedy = " Name a snapshot that is whole, a run's folder, or its store, or leave it out."
    with naming(f"snapshot.resume={resume}", remedy):
        found = find(resume, timeout).fetch(place, refuse=refuse)
    state = read_state(found.path)
    where = resume if found.contents else found.path
    named = _at(found, f"{where}, step {state.step}, as snapshot.resume asks")
    state.origin, state.run_id = manifest_sha256(found.path), uuid.uuid4().hex
    return replace(
        named, state=state, warnings=own.warnings + named.warnings, contents=own.contents
    )
