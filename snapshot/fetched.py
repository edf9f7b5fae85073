"""Snapshots of the Hub that an attempt resumes from, or that are verified: all of their files."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from snapshot.disk.state import RunState, read_state
from snapshot.errors import SnapshotError
from snapshot.start import RemoteSnapshot, StateCheck, any_state
from store.bucket import Bucket
from store.client import Hub
from store.fetch import RepoContents, fetch, fetch_state, read_repo
from store.latest import remote_step
from store.newest import Fetched, newest_whole
from store.remote import Remote
from store.retries import with_retries


def fetch_newest(hub: Remote, revision: str, root: Path, refuse: StateCheck = any_state) -> Fetched:
    """The newest whole snapshot of any repo, downloaded to `root`. Raises as `fetch_newer`."""
    return fetch_newer(with_retries(hub, lambda: read_repo(hub, revision)), -1, root, refuse)


def fetch_newer(repo: RepoContents, step: int, root: Path, refuse: StateCheck) -> Fetched:
    """The newest whole snapshot of a repo that is of a later step, downloaded to `root`.

    Raises NoneWhole if there is none, HubError if the download fails, and what `refuse` raises for
    a state, before the rest of its snapshot is downloaded.
    """
    run_id = None if repo.latest is None else repo.latest.run_id

    def download(repo: RepoContents, folder: str) -> Path:
        return with_retries(repo.hub, partial(_fetch_checked, repo, folder, root, check))

    def check(state: RunState) -> None:
        if run_id is not None and state.run_id != run_id:
            raise SnapshotError(f"step {state.step} of {repo.name} belongs to another run")
        refuse(state)

    def later(repo: RepoContents) -> list[str]:
        return [folder for folder in repo.folders() if remote_step(folder) > step]

    return newest_whole(repo, download, later)


def skipped(faults: Iterable[str]) -> tuple[str, ...]:
    """Warnings about snapshots that are not whole."""
    return tuple(f"{fault}; skipped." for fault in faults)


def remote_snapshot(repo: RepoContents, folder: str) -> RemoteSnapshot:
    """Where a snapshot of a repo is, for other machines."""
    hub = repo.hub
    return RemoteSnapshot(hub.repo_id, repo.commit, folder, hub.timeout, isinstance(hub, Bucket))


def fetch_remote_snapshot(remote: RemoteSnapshot, root: Path) -> Path:
    """Download a snapshot to `root`. Raises as `fetch_newest` does."""
    make = Bucket if remote.is_bucket else Hub
    hub = make(remote.repo_id, remote.timeout)
    files = with_retries(hub, lambda: hub.files(remote.commit))
    return fetch(RepoContents(hub, remote.commit, True, files, None), remote.folder, root)


def _fetch_checked(repo: RepoContents, folder: str, root: Path, check: StateCheck) -> Path:
    """`fetch`, after a check of the state: nothing of another run comes to this disk."""
    state = None
    with suppress(SnapshotError, OSError):  # perhaps damaged in transit: `fetch` tries twice
        state = fetch_state(repo, folder)
    if state is not None:
        check(state)
    path = fetch(repo, folder, root)
    check(read_state(path))
    return path
