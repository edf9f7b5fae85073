"""The proof: which attempts are made, in which order, and the checks of each."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common.retries import with_retries
from config.schema import Config
from proving import checks
from proving.attempt import IN_SNAPSHOT, IN_STEP, IN_UPLOAD, SIGTERM, STEPS
from proving.checks import Line, failed, passed, unchecked, within
from proving.launch import KILLED, Launch, Outcome, Task
from snapshot.errors import SnapshotError
from store.errors import StoreError
from store.fetch import SMALL, fetch, fetch_newest, read_store
from store.kinds import open_store
from store.latest import remote_step
from store.store import Store
from training.exits import EXIT_AGAIN, EXIT_TERMINATED

FEW = 2
"""Steps that are compared between shapes, and sequences of their other micro-batches."""
SEQUENCES = 8
"""The most of a step that a process computes then: fewer may have the same number of targets, so
that nobody sees how micro-batches are weighed."""
AT_ONCE = 1e-6
"""A time limit, in minutes, that is over at the first step."""
FIRST_UPLOAD = 2
"""Steps of the attempt that uploads undisturbed."""
RUNS = ("undisturbed", "shape", "split", "one", "disturbed", "stored")
"""Folders of the runs of attempts."""


def lines_of_proof(launch: Launch, config: Config) -> Iterator[Line]:
    """All checks of a run. They need no other one, unless it is an attempt that failed."""
    whole = launch.run(Task("undisturbed", "undisturbed", STEPS, describes_text=True))
    if not whole.is_done:
        yield failed("the first steps", whole)
        return
    yield from checks.text(whole, config)
    is_new = config.model.pretrained is None
    yield from checks.contents(whole.snapshot(STEPS), is_new, config.snapshot.keep)
    yield from any_shape(launch, few_sequences(config, whole))
    remove(launch, "shape", "split", "one")
    yield from resumed(launch, config, whole)
    remove(launch, "disturbed")
    yield from stored(launch, config, whole)
    yield from checks.speed(whole, config)


def remove(launch: Launch, *runs: str) -> None:
    """Remove what attempts have written, but for their logs."""
    for name in runs or RUNS:
        with suppress(OSError):
            shutil.rmtree(launch.folder / name)


def few_sequences(config: Config, whole: Outcome) -> dict[str, Any]:
    """Keys for few sequences a process, with as uneven shares as the run has."""
    parts, batch = whole.facts["parts"], config.train.global_batch_size
    few = min(batch, SEQUENCES * parts + batch % parts)
    return {"train.global_batch_size": few, "train.micro_batch_size": 1}


def any_shape(launch: Launch, changes: Mapping[str, Any]) -> Iterator[Line]:
    """One run, any shape: the first steps in float32, split otherwise, and in one process."""
    processes = launch.processes
    here = launch.run(Task("shape", "shape", FEW, changes, in_float32=True))
    if not here.is_done:
        yield failed("the first steps in float32", here)
        return
    if changes["train.global_batch_size"] >= FEW:
        larger = {**changes, "train.micro_batch_size": FEW}
        split = launch.run(Task("split", "split", FEW, larger, in_float32=True))
        words = f"micro-batches of {FEW}, not 1"
        yield from checks.same_steps("split otherwise", here, split, words)
    else:
        yield unchecked("loss, split otherwise", "a step has one sequence")
    if processes == 1:
        yield unchecked("loss, one process", "one process was launched")
        return
    one = launch.run(Task("one", "one", FEW, changes, alone=True, in_float32=True))
    if not one.is_done and (one.code == KILLED or "memory" in one.last_words()):
        yield unchecked("loss, one process", f"it cannot hold all: {one.last_words()}")
        return
    yield from checks.same_steps("one process", here, one, f"one process, not {processes}")


def resumed(launch: Launch, config: Config, whole: Outcome) -> Iterator[Line]:
    """The first steps again, killed and stopped in every way, with the same bits in the end."""
    run, soon = "disturbed", {"run.max_minutes": AT_ONCE}
    ends = (
        ("killed in a step", Task("kill", run, STEPS, ended_by=IN_STEP), KILLED),
        ("killed in a snapshot", Task("kill2", run, STEPS, ended_by=IN_SNAPSHOT), KILLED),
        ("SIGTERM", Task("term", run, STEPS, ended_by=SIGTERM), EXIT_TERMINATED),
        ("time limit", Task("limit", run, STEPS, soon), EXIT_AGAIN),
    )
    for name, task, code in ends:
        yield checks.ended(name, launch.run(task), code, config)
    last = launch.run(Task("last", run, STEPS, fresh=True))
    if not last.is_done:
        yield failed("resumed", last)
        return
    one, two = whole.figures("loss"), last.figures("loss")
    # Bit for bit, in each step of both.
    same = checks.largest_difference(one, two) if one.keys() == two.keys() else float("inf")
    said = f"{STEPS} steps: {', '.join(name for name, *_ in ends)}"
    yield within("same losses after all of that", same, 0.0, said)
    yield checks.same_bits("same bits after all of that", whole, last, STEPS)


def stored(launch: Launch, config: Config, whole: Outcome) -> Iterator[Line]:
    """The run's store: a scratch one beside it is written, read on an empty disk, and removed."""
    name, seconds = "store", config.hub.timeout_seconds
    if config.hub.store_url is None:
        yield unchecked(name, "no hub.repo_id or hub.url: a lost disk loses the run")
        return
    real = open_store(config.hub.store_url, seconds)
    if real.is_offline:
        yield unchecked(name, "HF_HUB_OFFLINE is set: nothing is uploaded")
        return
    try:
        real.require_token()
        real.check_token()
        said = f"the credentials for {real.name} are not read-only"
        yield passed("rights in the store", True, said)
        # A store beside the run's, which nobody else uses.
        scratch = open_store(real.beside(f"-proof-{secrets.token_hex(4)}"), seconds)
        try:
            yield from in_scratch(launch, whole, scratch)
        finally:
            scratch.remove()
    except (StoreError, SnapshotError) as error:
        yield passed(name, False, f"{error}")


def in_scratch(launch: Launch, whole: Outcome, scratch: Store) -> Iterator[Line]:
    """An upload, a kill in the next one, and the run resumed from the store on an empty disk."""
    keys = {"hub.repo_id": None, "hub.url": scratch.url, "hub.min_interval_seconds": 0.0}
    uploaded = launch.run(Task("upload", "stored", FIRST_UPLOAD, keys))
    if not uploaded.is_done:
        yield failed("upload", uploaded)
        return
    newest = newest_step(scratch)
    said = f"{scratch.name} has step {newest}, the last of {FIRST_UPLOAD}; every file verified"
    yield passed("upload", newest == FIRST_UPLOAD, said)
    killed = launch.run(Task("kill3", "stored", STEPS, keys, ended_by=IN_UPLOAD))
    if killed.code != KILLED:
        yield failed("killed in an upload", killed, KILLED)
        return
    after = newest_step(scratch)
    said = f"the store still has step {after}, whole"
    yield passed("killed in an upload", after >= newest, said)
    shutil.rmtree(killed.folder)  # another machine has an empty disk
    fetched = launch.run(Task("fetch", "stored", STEPS, keys))
    if not fetched.is_done:
        yield failed("resumed from the store", fetched)
        return
    first = fetched.facts["first"]
    said = f"an empty disk continues with step {first}, after {after} of the store"
    yield passed("resumed from the store", first == after + 1, said)
    yield checks.same_bits("same bits from the store", whole, fetched, STEPS)


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
