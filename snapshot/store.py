"""A run's own repo at the start of an attempt: create it if needed, read it, resume from it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import get_token

from snapshot.disk.files import manifest_sha256
from snapshot.disk.state import RunState, read_state
from snapshot.errors import DiskFault, SnapshotError
from snapshot.fetched import fetch_newer, remote_snapshot, skipped
from snapshot.start import Start, StateCheck, any_state
from store.errors import (
    HubError,
    HubMissing,
    HubOffline,
    HubRefused,
    HubUnreachable,
    HubUnsupported,
    translate_errors,
)
from store.fetch import RepoContents, fetch_state, read_repo
from store.newest import Fetched, NoneWhole
from store.remote import BRANCH, Remote
from store.retries import with_retries


@dataclass(frozen=True)
class Store:
    """The repo that a run uploads to, and how it may be used."""

    hub: Remote
    private: bool
    takeover: bool

    @property
    def key(self) -> str:
        """The configuration key and value that name it."""
        return self.hub.key


def newest_state(store: Store, can_do_without: bool) -> RunState | None:
    """The state of the newest snapshot in a repo; None if there is none, or it cannot be read.

    For what must be known before a snapshot is chosen and downloaded. Raises HubUnreachable as
    `newest_of_disk_and_repo` does, unless this disk has a snapshot (`can_do_without`).
    """
    try:
        with suppress(SnapshotError, HubRefused, OSError):
            return with_retries(store.hub, lambda: _newest_state(store))
    except HubError as error:
        if not can_do_without:
            raise _unknown(store, error) from error
    return None


def _newest_state(store: Store) -> RunState | None:
    repo = read_repo(store.hub)
    for folder in repo.folders()[:1]:
        return fetch_state(repo, folder)
    return None


def newest_of_disk_and_repo(
    store: Store,
    newest: Path | None,
    state: RunState | None,
    root: Path,
    warnings: tuple[str, ...],
    refuse: StateCheck = any_state,
) -> Start:
    """The newer of two snapshots: the newest on this disk, and the repo's, downloaded to `root`.

    Raises SnapshotError if the repo holds something else, or if neither has a whole snapshot but
    the repo should; HubError if this disk has no snapshot and the Hub cannot tell whether it has;
    what `refuse` raises for the state of a snapshot, before the rest of that is downloaded.
    """
    local = Start(newest, state, f"{newest}, the newest of this run", warnings)
    repo, faults = open_repo(store, can_do_without=newest is not None)
    local = replace(local, warnings=warnings + faults)
    if repo is None:
        return local
    latest, local_step = repo.latest, -1 if state is None else state.step
    local = replace(local, repo=repo)
    if latest is None:
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
        reason = f"{local.reason}; {store.hub.name} has step {latest.step}"
        same = latest.manifest_sha256 == manifest_sha256(newest)
        remote = remote_snapshot(repo, latest.folder) if same else None
        return replace(local, reason=reason, remote=remote)
    try:
        found = fetch_newer(repo, local_step, root, refuse)
    except NoneWhole as error:
        if newest is None:
            raise SnapshotError(
                f"{str(error).rstrip('.')}. Start again in another repo, or with "
                "snapshot.resume=never and hub.takeover=true."
            ) from error
        return replace(local, warnings=local.warnings + skipped(error.faults))
    except (HubError, DiskFault) as error:
        if newest is None:
            raise
        fault = f"step {latest.step} of {repo.name} could not be fetched: {str(error).rstrip('.')}."
        return replace(local, warnings=(*local.warnings, fault))
    why = "there is none here" if newest is None else f"newer than step {local_step} here"
    return _fetched_start(local, found, why)


def _fetched_start(local: Start, found: Fetched, why: str) -> Start:
    place, remote = found.repo.name, remote_snapshot(found.repo, found.folder)
    if remote.is_bucket:  # which attempt of several: its folders tell
        place = f"{place}/{found.folder.rpartition('/')[0]}"
    return replace(
        local,
        folder=found.path,
        state=read_state(found.path),
        reason=f"{found.path}, fetched from {place}: {why}",
        warnings=local.warnings + skipped(found.faults),
        fetched=True,
        remote=remote,
        repo=found.repo,
    )


def start_in_empty_repo(store: Store) -> Start:
    """A start from scratch, in a repo that holds no run.

    Raises as `newest_of_disk_and_repo` does.
    """
    repo, faults = open_repo(store, can_do_without=False, is_new=True)
    if repo is None:
        return Start(None, None, "", faults)
    if repo.latest is not None and not store.takeover:
        raise SnapshotError(
            f"snapshot.resume=never, but {store.key} holds a run, at step {repo.latest.step}. Name "
            "a new repo; hub.takeover=true replaces what is in this one."
        )
    return Start(None, None, "", faults, repo=repo)


def open_repo(
    store: Store, can_do_without: bool, is_new: bool = False
) -> tuple[RepoContents | None, tuple[str, ...]]:
    """The contents of the repo, which is created if it does not exist; or None and a warning.

    `can_do_without`: this disk has a snapshot; `is_new`: the run starts from scratch.
    """
    try:
        repo = with_retries(store.hub, lambda: _read_or_create(store))
    except OSError as error:  # a bucket's files go through one
        fault = f"{store.hub.name} cannot be read without a temporary file: {error.strerror}. Free "
        fault += "some space, or set TMPDIR to a folder that can be written."
        if not can_do_without:
            raise DiskFault(fault) from error
        return None, (f"{fault} The run continues from what is here; uploads are retried.",)
    except HubRefused as error:
        if not can_do_without:
            raise
        return None, (f"{error} The run continues from what is here; uploads are retried.",)
    except HubError as error:
        if not can_do_without and not is_new:
            raise _unknown(store, error) from error
        rest = "uploads are retried"
        if isinstance(error, HubOffline):
            rest = "it uploads nothing, and its next start does"
        return None, (f"{error}. The run continues without it; {rest}.",)
    if store.private and not repo.private:
        raise SnapshotError(
            f"{store.key} is a public repo, and hub.private=true. Make it private, name another, "
            "or allow it with hub.private=false (a server without private repos needs that)."
        )
    if refusal := repo.refusal():
        raise SnapshotError(refusal)
    return repo, ()


def _unknown(store: Store, error: HubError) -> HubUnreachable:
    """Why a run without a snapshot here cannot begin while its repo cannot be read."""
    remedy = "Start again when the Hub can be reached"
    if isinstance(error, HubOffline):
        remedy = "Start again without HF_HUB_OFFLINE"
    return HubUnreachable(
        f"{error}: it is unknown whether {store.hub.name} holds a snapshot of this run, and there "
        f"is none here. {remedy}; a run that is new can begin with snapshot.resume=never."
    )


def _read_or_create(store: Store) -> RepoContents:
    with translate_errors(store.hub.name, BRANCH):
        token = get_token()
    if not token:
        store.hub.check_token()  # raises without a request
    try:
        found = read_repo(store.hub)
    except HubMissing:
        _check_token(store)
        store.hub.create(store.private)
        found = read_repo(store.hub)
        if store.private and not found.private:
            raise SnapshotError(
                f"{store.key}: the server has created a public repo, although a private one was "
                "requested (hub.private=true). Nothing was uploaded. Make it private there, or "
                "allow a public one with hub.private=false."
            ) from None
        return found
    _check_token(store)
    return found


def _check_token(store: Store) -> None:
    """Refuse a token that cannot write, before the first upload does.

    A start needs no answer, and some servers have none.
    """
    with suppress(HubUnreachable, HubUnsupported), store.hub.waiting.limit_to(1 / 4):
        store.hub.check_token()
