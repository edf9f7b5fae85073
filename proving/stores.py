"""The run's store: a scratch one beside it is written, read on an empty disk, and removed."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common.retries import with_retries
from config.schema import Config
from proving import folders
from proving.attempts import Launch
from proving.ends import KILLED
from proving.lines import RED, Line, failed, passed, unchecked
from proving.task import IN_UPLOAD, Outcome, Task
from snapshot.errors import SnapshotError
from store.errors import StoreError, Unsupported
from store.fetch import SMALL, fetch, fetch_newest, read_store
from store.kinds import open_store
from store.latest import remote_step
from store.store import Store
from training.exits import EXIT_DONE

FIRST = 2
"""Steps of the attempt that uploads undisturbed."""
FOLDER = "stored"
NAME = "store"


class Scratch:
    """A store beside the run's, which exists as long as the block of a `with`."""

    def __init__(self, config: Config) -> None:
        """`config` names the run's store."""
        assert config.hub.store_url is not None
        beside = open_store(config.hub.store_url, config.hub.timeout_seconds)
        self.store = open_store(
            beside.beside(f"-proof-{secrets.token_hex(4)}"), config.hub.timeout_seconds
        )

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.remove()

    @property
    def changes(self) -> dict[str, Any]:
        """The keys of an attempt that uses it."""
        return {
            "hub.repo_id": None,
            "hub.url": self.store.url,
            "hub.min_interval_seconds": 0.0,
        }

    def newest_step(self) -> int:
        """The step of its newest snapshot, after a download and all checks.

        Raises StoreError and SnapshotError.
        """
        contents = with_retries(lambda: read_store(self.store))
        with TemporaryDirectory() as folder:
            for place in contents.folders():  # none may be seen before all of it is there
                fetch(contents, place, Path(folder), SMALL)
            newest = fetch_newest(contents, Path(folder))
            if newest.faults:
                raise SnapshotError(newest.faults[0])
            return remote_step(newest.folder)


def stored(launch: Launch, config: Config, whole: Outcome, steps: int) -> Iterator[Line]:
    """Rights, speed, a kill in an upload, and the run resumed from the store on an empty disk."""
    if config.hub.store_url is None:
        yield unchecked(NAME, "no hub.repo_id or hub.url: a lost disk loses the run")
        return
    real = open_store(config.hub.store_url, config.hub.timeout_seconds)
    if real.is_offline:
        yield unchecked(NAME, "HF_HUB_OFFLINE is set: nothing is uploaded")
        return
    line = rights(real)
    yield line
    if line.status == RED:
        return
    try:
        with Scratch(config) as scratch:
            yield from in_scratch(launch, whole, steps, scratch)
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


def in_scratch(launch: Launch, whole: Outcome, steps: int, scratch: Scratch) -> Iterator[Line]:
    """The checks with a store that nobody else uses."""
    found = launch.run(Task("upload", FOLDER, FIRST, scratch.changes))
    if found.code != EXIT_DONE:
        yield failed("upload", found)
        return
    newest = scratch.newest_step()
    said = f"{scratch.store.name} has step {newest} when the attempt has ended, of {FIRST}"
    if sent := found.facts.get("sent"):
        said += f"; sent {sent}"
    yield passed("upload", newest == FIRST, f"{said}; every file verified")
    found = launch.run(Task("kill3", FOLDER, steps, scratch.changes, dies_in=IN_UPLOAD))
    if found.code != KILLED:
        yield failed("killed in an upload", found, KILLED)
        return
    after = scratch.newest_step()
    said = f"the store still has step {after}, whole"
    yield passed("killed in an upload", after >= newest, said)
    shutil.rmtree(found.folder)  # another machine has an empty disk
    found = launch.run(Task("fetch", FOLDER, steps, scratch.changes))
    if found.code != EXIT_DONE:
        yield failed("resumed from the store", found)
        return
    first = found.facts["first"]
    said = f"an empty disk continues with step {first}, after {after} of the store"
    yield passed("resumed from the store", first == after + 1, said)
    said = f"after step {steps}, of the run from the store and an undisturbed one"
    yield folders.same_bits(
        "same bits from the store", whole.snapshot(steps), found.snapshot(steps), said
    )
