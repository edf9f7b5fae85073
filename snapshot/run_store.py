"""A run's own store at the start of an attempt: created, read, completed from this disk."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from common.retries import with_retries
from snapshot.disk.folder import LARGEST_STEP
from snapshot.disk.state import RunState
from snapshot.errors import SnapshotError
from store.attempt import Attempt, Card, Policy, Upload, UploadTarget
from store.errors import (
    StoreError,
    StoreMissing,
    StoreOffline,
    StoreRefused,
    StoreUnreachable,
    Unsupported,
)
from store.fence import Fenced
from store.fetch import Contents, read_store
from store.store import Store


@dataclass(frozen=True)
class RunStore:
    """The store that a run uploads to, and how it may be used."""

    store: Store
    private: bool
    takeover: bool
    for_all: bool = False
    """Whether other machines begin from it, too: their disks lack what this disk has."""


def contents_at_start(
    own: RunStore, can_do_without: bool
) -> tuple[Contents | None, tuple[str, ...]]:
    """What the store holds, which is created if it does not exist; or None and a warning.

    `can_do_without`: this disk has a snapshot. Raises SnapshotError if the store holds something
    else or is public against `hub.private`; StoreError if the run cannot begin without it.
    """
    try:
        contents = with_retries(lambda: _read_or_create(own))
    except StoreError as error:
        offline, refused = isinstance(error, StoreOffline), isinstance(error, StoreRefused)
        if can_do_without:
            rest = "uploads are retried"
            if offline:
                rest = "it uploads nothing, and its next start does"
            return None, (f"{str(error).rstrip('.')}. The run continues without it; {rest}.",)
        if refused:
            raise
        remedy = "without HF_HUB_OFFLINE" if offline else "when it can be reached"
        lack = "none is on all machines" if own.for_all else "there is none here"
        raise StoreUnreachable(
            f"{error}: it is unknown whether {own.store.name} holds a snapshot of this run, and "
            f"{lack}. Start again {remedy}; a run that is new can begin without "
            f"{own.store.key.partition('=')[0]}, which a later start may have."
        ) from error
    if own.private and not contents.head.private:
        raise SnapshotError(
            f"{own.store.key} is a public repo, and hub.private=true. Nothing was uploaded. "
            "Make it private, name another, or allow it with hub.private=false (a server without "
            "private repos needs that)."
        )
    if refusal := contents.refusal():
        raise SnapshotError(refusal)
    return contents, ()


def _read_or_create(own: RunStore) -> Contents:
    store = own.store
    store.require_token()
    contents = None
    with suppress(StoreMissing):
        contents = read_store(store)
    # Refused now and not at the first upload. A start needs no answer, and some servers give none.
    with suppress(StoreUnreachable, Unsupported):
        store.check_token()
    if contents is None:
        store.create(own.private)
        contents = read_store(store)
    return contents


def upload_for_all(own: RunStore, contents: Contents, newest: Path, state: RunState) -> Contents:
    """The contents of the store with a snapshot that only this disk has, for other machines.

    Raises StoreError if it cannot be uploaded.
    """
    prunes_nothing = Policy(LARGEST_STEP, 0.0, own.private, own.takeover)
    target = UploadTarget(own.store, prunes_nothing, state.run_id, uuid4().hex, contents.latest)
    attempt = Attempt(target)
    upload = Upload(newest, Card(f"# Step {state.step}\n"))
    try:
        with_retries(lambda: attempt.upload(upload))
    except Fenced as error:
        again = f"another start has uploaded to {own.store.name} meanwhile. Start again."
        raise StoreUnreachable(again, "another uploads") from error
    return with_retries(lambda: read_store(own.store))
