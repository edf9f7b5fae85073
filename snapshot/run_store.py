"""A run's own repo or bucket at the start of an attempt: created, read, downloaded from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from snapshot.disk.files import LARGEST_STEP
from snapshot.disk.state import RunState, read_state
from snapshot.errors import SnapshotError
from store.errors import (
    StoreError,
    StoreMissing,
    StoreOffline,
    StoreRefused,
    StoreUnreachable,
    Unsupported,
)
from store.fence import Fenced
from store.fetch import Contents, Fetched, fetch, fetch_state, newest_whole, read_store
from store.kinds import begin_attempt, open_store
from store.latest import remote_step
from store.store import Card, Policy, Store, Upload, UploadTarget, with_retries

Fetch = Callable[[Contents, str, Path], Path]
"""Downloads a snapshot to a folder: `fetch` all of it, `fetch_small` what describes it."""
StateCheck = Callable[[RunState], object]
"""Raises SnapshotError for the state of a snapshot that an attempt must not resume from."""


@dataclass(frozen=True)
class RunStore:
    """The repo that a run uploads to, and how it may be used."""

    store: Store
    private: bool
    takeover: bool
    known: Contents | None = None
    """Its contents as this start has read them before."""
    for_all: bool = False
    """Whether other machines begin from it, too: their disks lack what this disk has."""

    @property
    def key(self) -> str:
        """The configuration key and value that name it."""
        return self.store.key


@dataclass(frozen=True)
class RemoteSnapshot:
    """A snapshot on the Hub, at a commit, so that it cannot change."""

    url: str
    """Of its store."""
    commit: str
    folder: str
    timeout: float = 60.0
    """`hub.timeout_seconds`: how long a request waits for a response."""

    @classmethod
    def of(cls, repo: Contents, folder: str) -> RemoteSnapshot:
        """The snapshot in a folder of a repo."""
        return cls(repo.store.url, repo.commit, folder, repo.store.timeout)

    def fetch_to(self, root: Path, fetch: Fetch = fetch) -> Path:
        """Download it to `root`. Raises SnapshotError and StoreError."""
        store = open_store(self.url, self.timeout)
        files = with_retries(lambda: store.files(self.commit))
        return fetch(Contents(store, self.commit, True, files, None), self.folder, root)


def open_repo(store: RunStore, can_do_without: bool) -> tuple[Contents | None, tuple[str, ...]]:
    """The contents of the repo, which is created if it does not exist; or None and a warning.

    `can_do_without`: this disk has a snapshot. Raises SnapshotError if the repo holds something
    else or is public against `hub.private`; StoreError if the run cannot begin without it.
    """
    try:
        repo = with_retries(lambda: _read_or_create(store))
    except StoreRefused as error:
        if not can_do_without:
            raise
        return None, (f"{error} The run continues from what is here; uploads are retried.",)
    except StoreError as error:
        offline = isinstance(error, StoreOffline)
        if not can_do_without:
            remedy = "without HF_HUB_OFFLINE" if offline else "when the Hub can be reached"
            lack = "none is on all machines" if store.for_all else "there is none here"
            raise StoreUnreachable(
                f"{error}: it is unknown whether {store.store.name} holds a snapshot of this run, "
                f"and {lack}. Start again {remedy}; a run that is new can begin "
                f"without {store.key.partition('=')[0]}, which a later start may have."
            ) from error
        rest = "it uploads nothing, and its next start does" if offline else "uploads are retried"
        return None, (f"{error}. The run continues without it; {rest}.",)
    if store.private and not repo.private:
        raise SnapshotError(
            f"{store.key} is a public repo, and hub.private=true. Make it private, name another, "
            "or allow it with hub.private=false (a server without private repos needs that)."
        )
    if refusal := repo.refusal():
        raise SnapshotError(refusal)
    return repo, ()


def with_newest(store: RunStore, repo: Contents, newest: Path, state: RunState) -> Contents:
    """The contents of the repo, with this run's newest snapshot, which may be on this disk alone.

    Raises StoreError if it cannot be uploaded.
    """
    latest = repo.latest
    if latest is not None and latest.run_id == state.run_id and latest.step >= state.step:
        return repo
    if latest is not None and latest.run_id != state.run_id and not store.takeover:
        return repo
    prunes_nothing = Policy(LARGEST_STEP, 0.0, store.private, store.takeover)
    target = UploadTarget(store.store, prunes_nothing, state.run_id, uuid4().hex, latest)
    attempt = begin_attempt(target, lambda text: None)
    upload = Upload(newest, Card(f"# Step {state.step}\n"))
    with suppress(Fenced):  # another start has uploaded meanwhile
        with_retries(lambda: attempt.upload(upload))
    return with_retries(lambda: read_store(store.store))


def _read_or_create(store: RunStore) -> Contents:
    if store.known is not None and store.known.commit:  # a bucket has no commits
        commit, _ = store.store.head()
        return store.known if commit == store.known.commit else read_store(store.store)
    store.store.require_token()
    found = _read(store)
    _check_token(store)
    if found is None:
        store.store.create(store.private)
        found = read_store(store.store)
        if store.private and not found.private:
            raise SnapshotError(
                f"{store.key}: the server has created a public repo, although a private one was "
                "requested (hub.private=true). Nothing was uploaded. Make it private there, or "
                "allow a public one with hub.private=false."
            )
    return found


def _read(store: RunStore) -> Contents | None:
    """The contents of the repo; None if there is none."""
    with suppress(StoreMissing):
        return read_store(store.store)
    return None


def _check_token(store: RunStore) -> None:
    """Refuse a token that cannot write, before the first upload does.

    A start does not need the answer, and some servers give none.
    """
    with suppress(StoreUnreachable, Unsupported):
        store.store.check_token()


def checked(fetch: Fetch, refuse: StateCheck = lambda state: None) -> Fetch:
    """`fetch`, after a check of the state: nothing of another run comes to this disk."""

    def fetch_checked(repo: Contents, folder: str, root: Path) -> Path:
        def check(state: RunState) -> None:
            if repo.latest is not None and state.run_id != repo.latest.run_id:
                raise SnapshotError(f"step {state.step} of {repo.name} belongs to another run")
            refuse(state)

        state = None
        with suppress(SnapshotError, OSError):  # perhaps damaged in transit: `fetch` tries twice
            state = fetch_state(repo, folder)
        if state is not None:
            check(state)
        path = fetch(repo, folder, root)
        check(read_state(path))
        return path

    return fetch_checked


def fetch_newest(store: Store, revision: str, root: Path, fetch: Fetch) -> Fetched:
    """The newest whole snapshot of any repo, downloaded to `root`. Raises as `fetch_newer`."""
    return fetch_newer(with_retries(lambda: read_store(store, revision)), -1, root, fetch)


def fetch_newer(repo: Contents, step: int, root: Path, fetch: Fetch) -> Fetched:
    """The newest whole snapshot of a repo that is of a later step, downloaded to `root`.

    Raises NoneWhole if there is none, StoreError if the download fails, and what `fetch` raises for
    the state of another run.
    """
    before = repo.latest

    def download(repo: Contents, folder: str) -> Path:
        return with_retries(lambda: fetch(repo, folder, root))

    def later(now: Contents) -> list[str]:
        if before is not None and (now.latest is None or now.latest.run_id != before.run_id):
            return []  # another run has replaced this one meanwhile
        return [folder for folder in now.folders() if remote_step(folder) > step]

    return newest_whole(repo, download, later)


def skipped(faults: Iterable[str]) -> tuple[str, ...]:
    """Warnings about snapshots that are not whole."""
    return tuple(f"{fault.rstrip('.')}; skipped." for fault in faults)
