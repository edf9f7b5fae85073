"""The run's store: a scratch one beside it is written, read on an empty disk, and removed."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from common.retries import with_retries
from config.schema import Config
from proving.attempt import IN_UPLOAD, STEPS
from proving.checks import RED, Line, failed, passed, same_bits, unchecked
from proving.launch import KILLED, Launch, Outcome, Task
from snapshot.errors import SnapshotError
from store.errors import StoreError, Unsupported
from store.fetch import SMALL, fetch, fetch_newest, read_store
from store.kinds import open_store
from store.latest import remote_step
from store.store import Store

FIRST = 2
"""Steps of the attempt that uploads undisturbed."""
FOLDER = "stored"
NAME = "store"


def newest_step(store: Store) -> int:
    """The step of a store's newest snapshot, after a download and all checks.

    Raises StoreError and SnapshotError.
    """
    contents = with_retries(lambda: read_store(store))
    with TemporaryDirectory() as folder:
        for place in contents.folders():  # none may be seen before all of it is there
            fetch(contents, place, Path(folder), SMALL)
        newest = fetch_newest(contents, Path(folder))
        if newest.faults:
            raise SnapshotError(newest.faults[0])
        return remote_step(newest.folder)


def stored(launch: Launch, config: Config, whole: Outcome) -> Iterator[Line]:
    """Rights, speed, a kill in an upload, and the run resumed from the store on an empty disk."""
    if config.hub.store_url is None:
        yield unchecked(NAME, "no hub.repo_id or hub.url: a lost disk loses the run")
        return
    seconds = config.hub.timeout_seconds
    real = open_store(config.hub.store_url, seconds)
    if real.is_offline:
        yield unchecked(NAME, "HF_HUB_OFFLINE is set: nothing is uploaded")
        return
    line = rights(real)
    yield line
    if line.status == RED:
        return
    try:
        # A store beside the run's, which nobody else uses.
        scratch = open_store(real.beside(f"-proof-{secrets.token_hex(4)}"), seconds)
        try:
            yield from in_scratch(launch, whole, scratch)
        finally:
            scratch.remove()
    except (StoreError, SnapshotError) as error:
        yield passed(NAME, False, f"{error}")


def rights(store: Store) -> Line:
    """Whether the token may write."""
    name = "rights in the store"
    try:
        store.require_token()
        store.check_token()
    except Unsupported as error:
        return unchecked(name, str(error))
    except StoreError as error:
        return passed(name, False, str(error))
    return passed(name, True, f"the credentials for {store.name} are not read-only")


def in_scratch(launch: Launch, whole: Outcome, scratch: Store) -> Iterator[Line]:
    """The checks with a store that nobody else uses."""
    keys = {"hub.repo_id": None, "hub.url": scratch.url, "hub.min_interval_seconds": 0.0}
    uploaded = launch.run(Task("upload", FOLDER, FIRST, keys))
    if not uploaded.is_done:
        yield failed("upload", uploaded)
        return
    newest = newest_step(scratch)
    said = f"{scratch.name} has step {newest} when the attempt has ended, of {FIRST}"
    if sent := uploaded.facts.get("sent"):
        said += f"; sent {sent}"
    yield passed("upload", newest == FIRST, f"{said}; every file verified")
    killed = launch.run(Task("kill3", FOLDER, STEPS, keys, dies_in=IN_UPLOAD))
    if killed.code != KILLED:
        yield failed("killed in an upload", killed, KILLED)
        return
    after = newest_step(scratch)
    said = f"the store still has step {after}, whole"
    yield passed("killed in an upload", after >= newest, said)
    shutil.rmtree(killed.folder)  # another machine has an empty disk
    resumed = launch.run(Task("fetch", FOLDER, STEPS, keys))
    if not resumed.is_done:
        yield failed("resumed from the store", resumed)
        return
    first = resumed.facts["first"]
    said = f"an empty disk continues with step {first}, after {after} of the store"
    yield passed("resumed from the store", first == after + 1, said)
    said = f"after step {STEPS}, of the run from the store and an undisturbed one"
    yield same_bits(
        "same bits from the store", whole.snapshot(STEPS), resumed.snapshot(STEPS), said
    )
