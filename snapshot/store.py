"""A run's own repo at the start of an attempt: opened, asked what it holds, and resumed from."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from snapshot.disk.files import identity
from snapshot.disk.state import RunState, read_state
from snapshot.errors import SnapshotError
from snapshot.hub.client import Hub
from snapshot.hub.errors import HubError, HubMissing, HubRefused, HubUnknown, HubUnreachable
from snapshot.hub.fetch import Remote, fetch, foreign_content, look_at, remote_step
from snapshot.start import Place, Start

Result = TypeVar("Result")
PATIENCE_SECONDS = (1.0, 3.0)
"""Between the tries of a start; somebody may be waiting in front of it."""


@dataclass(frozen=True)
class Store:
    """The repo that a run uploads to, and how it may be used."""

    hub: Hub
    private: bool
    takeover: bool

    @property
    def key(self) -> str:
        """As it stands on the command line."""
        return f"hub.repo_id={self.hub.repo_id}"


def newest_of_both(
    store: Store,
    newest: Path | None,
    state: RunState | None,
    root: Path,
    warnings: tuple[str, ...],
) -> Start:
    """The newer of this disk's newest snapshot and the repo's, which is downloaded into `root`.

    Raises SnapshotError where the repo holds something else, or nothing that is whole and the disk
    neither; HubError where there is no snapshot here and the Hub does not say whether it has one.
    """
    local = Start(newest, state, f"{newest}, the newest of this run", warnings)
    remote, faults = _asked(store, may_go_on=newest is not None)
    local = replace(local, warnings=warnings + faults)
    if remote is None:
        return local
    latest, here = remote.latest, -1 if state is None else state.step
    local = replace(local, hub_is_known=True, seen=latest)
    if latest is None:
        if remote.fault is None or newest is not None:
            return local
        return _newest_without_latest(remote, local, root)
    if state is not None and latest.run_id != state.run_id:
        if store.takeover:
            return local
        raise SnapshotError(
            f"{store.key} holds another run than {root.parent}, at step {latest.step}. Name "
            "another repo, or give the new run another run.name; hub.takeover=true replaces what "
            "is in the repo."
        )
    if newest is not None and latest.step <= here:
        reason = f"{local.reason}; {store.hub.repo_id} has step {latest.step}"
        same = latest.manifest_sha256 == identity(newest)
        place = _place(remote, latest.folder) if same else None
        return replace(local, reason=reason, place=place)
    newer = [folder for folder in remote.folders() if remote_step(folder) > here]
    try:
        found = _first_whole(remote, newer, root, latest.run_id)
    except HubError as error:
        if newest is None:
            raise
        fault = f"step {latest.step} of {remote.name} could not be fetched: {error}"
        return replace(local, warnings=(*local.warnings, fault))
    local = replace(local, warnings=local.warnings + found.faults)
    if found.path is None:
        if newest is None:
            raise _none_whole(remote, found.faults)
        return local
    why = "there is none here" if newest is None else f"newer than step {here} here"
    taken = read_state(found.path)
    reason = f"{found.path}, fetched from {remote.name}: {why}"
    return replace(local, folder=found.path, state=taken, reason=reason, place=found.place)


def _newest_without_latest(remote: Remote, local: Start, root: Path) -> Start:
    """The newest snapshot of a repo whose latest.json says nothing."""
    found = _first_whole(remote, remote.folders(), root, None)
    if found.path is None:
        raise _none_whole(remote, found.faults)
    reason = f"{found.path}, fetched from {remote.name}: there is none here"
    return replace(
        local,
        folder=found.path,
        state=read_state(found.path),
        reason=reason,
        warnings=local.warnings + found.faults,
        place=found.place,
    )


def _none_whole(remote: Remote, faults: tuple[str, ...]) -> SnapshotError:
    what = faults[0] if faults else "there is none left."
    return SnapshotError(
        f"none of the snapshots in {remote.name} is whole: {what} Begin again in another repo, or "
        "with snapshot.resume=never and hub.takeover=true."
    )


def begin_in(store: Store) -> Start:
    """A run from the beginning in a repo that holds none. Raises as `newest_of_both` does."""
    remote, faults = _asked(store, may_go_on=False, is_new=True)
    if remote is None:
        return Start(None, None, "", faults)
    if remote.folders() and not store.takeover:
        newest = remote_step(remote.folders()[0])
        raise SnapshotError(
            f"snapshot.resume=never, but {store.key} holds a run, at step {newest}. Name a new "
            "repo; hub.takeover=true replaces what is in this one."
        )
    return Start(None, None, "", faults, seen=remote.latest, hub_is_known=True)


@dataclass(frozen=True)
class Fetched:
    """What came of looking for a whole snapshot in a repo."""

    path: Path | None
    place: Place | None
    faults: tuple[str, ...]
    """What is wrong with those before it."""


def fetch_newest(hub: Hub, revision: str, root: Path) -> Fetched:
    """The newest whole snapshot of any repo, downloaded into `root`.

    Raises SnapshotError where there is none, HubError where it does not come.
    """
    remote = with_retries(lambda: look_at(hub, revision))
    run_id = None if remote.latest is None else remote.latest.run_id
    found = _first_whole(remote, remote.folders(), root, run_id)
    if found.path is None:
        what = f"is whole: {found.faults[0]}" if found.faults else "is there."
        raise SnapshotError(f"no snapshot in {remote.name} {what}")
    return found


def fetch_place(place: Place, root: Path) -> Path:
    """The snapshot of a place, downloaded into `root`. Raises as `fetch_newest` does."""
    hub = Hub(place.repo_id, place.timeout)
    files = with_retries(lambda: hub.files(place.commit))
    return fetch(Remote(hub, place.commit, True, files, None), place.folder, root)


def _place(remote: Remote, folder: str) -> Place:
    return Place(remote.hub.repo_id, remote.commit, folder, remote.hub.timeout)


def with_retries(work: Callable[[], Result]) -> Result:
    """`work()`, tried again a few times while the Hub cannot be reached."""
    for seconds in PATIENCE_SECONDS:
        try:
            return work()
        except HubUnreachable:
            time.sleep(seconds)
    return work()


def _first_whole(remote: Remote, folders: list[str], root: Path, run_id: str | None) -> Fetched:
    faults = []
    for folder in folders:
        try:
            path = with_retries(lambda folder=folder: fetch(remote, folder, root))  # type: ignore[misc]
            if run_id is not None and read_state(path).run_id != run_id:
                raise SnapshotError(f"{folder} of {remote.name} belongs to another run")
        except SnapshotError as error:
            faults.append(f"{str(error).rstrip('.')}; passed over.")
        else:
            return Fetched(path, _place(remote, folder), tuple(faults))
    return Fetched(None, None, tuple(faults))


def _asked(
    store: Store, may_go_on: bool, is_new: bool = False
) -> tuple[Remote | None, tuple[str, ...]]:
    """The repo, made if need be, or why it does not answer."""
    try:
        remote = with_retries(lambda: _opened(store))
    except HubRefused as error:
        if not may_go_on:
            raise
        return None, (f"{error} The run goes on from what is here; uploads are tried again.",)
    except HubError as error:
        if not may_go_on and not is_new:
            raise HubUnreachable(
                f"{error}: nobody can say whether {store.hub.repo_id} holds a snapshot of this "
                "run, and there is none here. Start again when the Hub can be reached; a run "
                "that is new can begin with snapshot.resume=never."
            ) from error
        return None, (f"{error}. The run goes on without it; uploads are tried again.",)
    if store.private and not remote.private:
        raise SnapshotError(
            f"{store.key} is a public repo, and hub.private=true. Make it private, name another, "
            "or allow it with hub.private=false."
        )
    if foreign := remote.holds_something_else():
        raise SnapshotError(foreign_content(store.hub, foreign))
    return remote, () if remote.fault is None else (f"{remote.fault}; it is written anew.",)


def _opened(store: Store) -> Remote:
    # Asked only to be able to say it in time; some servers do not know whose a token is.
    with suppress(HubUnreachable, HubUnknown):
        store.hub.check_token()
    try:
        return look_at(store.hub)
    except HubMissing:
        store.hub.create(store.private)
        return look_at(store.hub)
