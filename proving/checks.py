"""The checks of a proof: which attempts are made, what is compared, and how it came out."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common.retries import with_retries
from config.schema import Config
from proving.attempt import IN_SNAPSHOT, IN_STEP, IN_UPLOAD, SIGTERM, STEPS, Task
from proving.launch import KILLED, Launch, Outcome
from proving.logits import compare_logits
from snapshot.disk.checking import check_snapshot
from snapshot.disk.folder import manifest_entries
from snapshot.errors import SnapshotError
from store.errors import StoreError
from store.fetch import SMALL, fetch, fetch_newest, read_store
from store.kinds import open_store
from store.latest import remote_step
from store.store import Store
from training.distributed.launcher import shutdown_timeout
from training.exits import EXIT_AGAIN, EXIT_DONE, EXIT_TERMINATED

GREEN, RED, GREY = "green", "red", "grey"
"""It holds; it does not; it could not be checked here."""
STATUS = {True: GREEN, False: RED, None: GREY}
LOSS, NORM = 1e-5, 1e-4
"""Bounds of relative differences in float32: sums in another order differ by less."""
MOST_HELD_OUT = 0.5
"""The largest share of the held-out rows that may be in the training text."""
TENSORS = ".safetensors"
PLAIN = (TENSORS, ".json", ".jinja", ".txt", ".model")
"""File extensions of data; none of them is executed when it is read."""
FEW = 2
"""Steps of short attempts, and sequences of their other micro-batches."""
SEQUENCES = 8
"""The most of a step that a process computes then: fewer may have the same number of targets, so
that nobody sees how micro-batches are weighed."""
AT_ONCE = 1e-6
"""A time limit, in minutes, that is over at the first step."""
RUNS = ("undisturbed", "shape", "split", "one", "disturbed", "stored")
"""Folders of the runs of attempts."""


@dataclass(frozen=True)
class Line:
    """One check."""

    name: str
    status: str
    said: str
    """What was compared, or why it could not be."""


def checked(name: str, holds: bool | None, said: str) -> Line:
    """A check that holds or not; None if it is not possible here."""
    return Line(name, STATUS[holds], said)


def within(name: str, difference: float, bound: float, said: str) -> Line:
    """A check of a difference; one that is not a number is red."""
    return checked(name, difference <= bound, f"{said}: {difference:.1e}, at most {bound:.0e}")


def failed(name: str, found: Outcome, code: int = EXIT_DONE) -> Line:
    """An attempt that ended otherwise than it should."""
    wanted = f", not {code}" if code != EXIT_DONE else ""
    said = f"exit code {found.code}{wanted}: {found.last_words()} ({found.log})"
    return checked(name, False, said)


def lines_of_proof(launch: Launch, config: Config) -> Iterator[Line]:
    """All checks of a run. They need no other one, unless it is an attempt that failed."""
    whole = launch.run(Task("undisturbed", "undisturbed", describes_text=True))
    if not whole.is_done:
        yield failed("the first steps", whole)
        return
    yield from text(whole, config)
    is_new = config.model.pretrained is None
    yield from contents(whole.snapshot(STEPS), is_new, config.snapshot.keep)
    yield from any_shape(launch, config, whole.facts["parts"])
    launch.remove("shape", "split", "one")
    yield from resumed(launch, config, whole)
    launch.remove("disturbed")
    yield from stored(launch, config, whole)


def text(whole: Outcome, config: Config) -> Iterator[Line]:
    """What is trained on."""
    facts = whole.facts["text"]
    yield checked("first row", True, f"the model learns to write what is in »«: {facts['row']}")
    each, parts = facts["rows"] / whole.facts["step"], whole.facts["parts"]
    most = -(-config.train.global_batch_size // parts)
    said = f"a process computes {each:g} rows a step, at most {most}: one of {parts} parts"
    yield checked("share of a batch", each <= most, said)
    repeated, looked_for = facts["held_out_found"], facts["held_out_looked_for"]
    said = f"{repeated} of {looked_for} held-out rows are in the training text"
    yield within("held-out text", repeated / max(1, looked_for), MOST_HELD_OUT, said)
    wrong = facts["misplaced_targets"]
    yield checked("targets", wrong == 0, f"each is the token that follows; {wrong} are not")
    if (wrong := facts["unended_replies"]) is None:
        yield checked("loss mask", None, "it is a text: every token is a target")
    else:
        said = f"each reply is trained on to its end; {wrong} are not"
        yield checked("loss mask", wrong == 0, said)
    yield checked("tokens", facts["lost"] is None, facts["lost"] or "they hold all of the text")


def contents(folder: Path, is_new: bool, keep: int) -> Iterator[Line]:
    """A snapshot as others find it: whole, without code, the same model for transformers.

    `is_new`: it began with random weights. `keep` such snapshots have room on the disk.
    """
    try:
        check_snapshot(folder)
    except SnapshotError as error:
        yield checked("snapshot is whole", False, str(error))
        return
    entries = manifest_entries(folder)
    yield checked("snapshot is whole", True, f"{len(entries)} files, digests and headers verified")
    other = sorted(path for path in entries if not path.endswith(PLAIN))
    said = "safetensors, JSON and text alone: nothing can run when it is loaded"
    if other:
        said = f"{other[0]} may run when it is loaded"
    yield checked("no code in it", not other, said)
    yield checked("loads in transformers", *compare_logits(folder, is_new))
    size, free = sum(size for size, _ in entries.values()), shutil.disk_usage(folder).free
    said = f"{keep + 1} snapshots of {size / 1e9:,.3f} GB (snapshot.keep and a new one); "
    yield checked("disk", free > (keep + 1) * size, f"{said}{free / 1e9:,.1f} GB are free")


def any_shape(launch: Launch, config: Config, parts: int) -> Iterator[Line]:
    """One run, any shape: the first steps in float32, split otherwise, and in one process.

    A step has few sequences then, with as uneven shares for the `parts` of a batch as in the run.
    """
    batch, processes = config.train.global_batch_size, launch.processes
    few = min(batch, SEQUENCES * parts + batch % parts)
    changes = {"train.global_batch_size": few, "train.micro_batch_size": 1}
    here = launch.run(Task("shape", "shape", FEW, changes, in_float32=True))
    if not here.is_done:
        yield failed("the first steps in float32", here)
        return
    if few >= FEW:
        larger = {**changes, "train.micro_batch_size": FEW}
        split = launch.run(Task("split", "split", FEW, larger, in_float32=True))
        yield from same_steps("split otherwise", here, split, f"micro-batches of {FEW}, not 1")
    else:
        yield checked("loss, split otherwise", None, "a step has one sequence")
    if processes == 1:
        yield checked("loss, one process", None, "one process was launched")
        return
    one = launch.run(Task("one", "one", FEW, changes, alone=True, in_float32=True))
    if not one.is_done and (one.code == KILLED or "memory" in one.last_words()):
        yield checked("loss, one process", None, f"it cannot hold all: {one.last_words()}")
        return
    yield from same_steps("one process", here, one, f"one process, not {processes}")


def same_steps(name: str, here: Outcome, other: Outcome, words: str) -> Iterator[Line]:
    """Losses and gradient norms of the first steps of two attempts in float32."""
    if not other.is_done:
        yield failed(f"loss, {name}", other)
        return
    for what, figure, bound in (("loss", "loss", LOSS), ("gradient norm", "grad_norm", NORM)):
        one, two = here.figures(figure), other.figures(figure)
        said = f"{FEW} steps in float32 against {words}"
        yield within(f"{what}, {name}", largest_difference(one, two), bound, said)


def largest_difference(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """The largest relative one; infinite if they have other steps, or a figure is missing."""
    if not one or one.keys() != other.keys() or None in (*one.values(), *other.values()):
        return float("inf")
    return max(abs(one[step] - other[step]) / abs(one[step]) for step in one)


def resumed(launch: Launch, config: Config, whole: Outcome) -> Iterator[Line]:
    """The first steps again, killed and stopped in every way, with the same bits in the end."""
    run, soon = "disturbed", {"run.max_minutes": AT_ONCE}
    ends = (
        ("killed in a step", Task("kill", run, ended_by=IN_STEP), KILLED),
        ("killed in a snapshot", Task("kill2", run, ended_by=IN_SNAPSHOT), KILLED),
        ("SIGTERM", Task("term", run, ended_by=SIGTERM), EXIT_TERMINATED),
        ("time limit", Task("limit", run, changes=soon), EXIT_AGAIN),
    )
    for name, task, code in ends:
        yield ended(name, launch.run(task), code, config)
    last = launch.run(Task("last", run, fresh=True))
    if not last.is_done:
        yield failed("resumed", last)
        return
    difference = largest_difference(whole.figures("loss"), last.figures("loss"))
    said = f"{STEPS} steps: {', '.join(name for name, *_ in ends)}"
    yield within("same losses after all of that", difference, 0.0, said)
    yield same_bits("same bits after all of that", whole, last)


def ended(name: str, found: Outcome, code: int, config: Config) -> Line:
    """Whether an attempt ended as it should; a stopped one leaves a snapshot."""
    if found.code != code:
        return failed(name, found, code)
    if code == KILLED:
        return checked(name, True, "the next attempt resumes")
    if not found.snapshot(step := found.facts["step"]).exists():
        return checked(name, False, f"the attempt left no snapshot of step {step}, its last")
    said = f"left a snapshot of step {step} and exit code {code}"
    if (took := found.facts.get("stop_seconds")) is None:
        return checked(name, True, said)
    allowed = min(config.run.grace_seconds, shutdown_timeout())
    said += f", {took:.1f} s after the signal; it has {allowed:g} s"
    return checked(name, took <= allowed, said)


def same_bits(name: str, whole: Outcome, other: Outcome) -> Line:
    """Weights and optimizer state of two attempts, by the digests of their snapshots' files."""
    try:
        check_snapshot(other.snapshot(STEPS))
    except (OSError, SnapshotError) as error:
        return checked(name, False, f"there is no whole snapshot: {error}")
    first, second = (
        {path: entry for path, entry in entries.items() if path.endswith(TENSORS)}
        for entries in (manifest_entries(found.snapshot(STEPS)) for found in (whole, other))
    )
    said = f"after step {STEPS}, against an undisturbed attempt"
    if differing := sorted(path for path, _ in first.items() ^ second.items()):
        return checked(name, False, f"{differing[0]} differs; {said}")
    size = sum(size for size, _ in first.values())
    return checked(name, True, f"{size / 1e6:,.1f} MB of weights and optimizer state: {said}")


def stored(launch: Launch, config: Config, whole: Outcome) -> Iterator[Line]:
    """The run's store: a scratch one beside it is written, read on an empty disk, and removed."""
    name, seconds = "store", config.hub.timeout_seconds
    if config.hub.store_url is None:
        yield checked(name, None, "no hub.repo_id or hub.url: a lost disk loses the run")
        return
    real = open_store(config.hub.store_url, seconds)
    if real.is_offline:
        yield checked(name, None, "HF_HUB_OFFLINE is set: nothing is uploaded")
        return
    try:
        real.check_token()
        said = f"the credentials for {real.name} are not read-only"
        yield checked("rights in the store", True, said)
        # A store beside the run's, which nobody else uses.
        scratch = open_store(real.beside(f"-proof-{secrets.token_hex(4)}"), seconds)
        try:
            yield from in_scratch(launch, whole, scratch)
        finally:
            scratch.remove()
    except (StoreError, SnapshotError) as error:
        yield checked(name, False, str(error))


def in_scratch(launch: Launch, whole: Outcome, scratch: Store) -> Iterator[Line]:
    """An upload, a kill in the next one, and the run resumed from the store on an empty disk."""
    keys: dict[str, Any] = {"hub.repo_id": None, "hub.url": scratch.url}
    keys["hub.min_interval_seconds"] = 0.0
    uploaded = launch.run(Task("upload", "stored", FEW, keys))
    if not uploaded.is_done:
        yield failed("upload", uploaded)
        return
    newest = newest_step(scratch)
    said = f"{scratch.name} has step {newest}, the last of {FEW}; every file verified"
    yield checked("upload", newest == FEW, said)
    killed = launch.run(Task("kill3", "stored", changes=keys, ended_by=IN_UPLOAD))
    if killed.code != KILLED:
        yield failed("killed in an upload", killed, KILLED)
        return
    after = newest_step(scratch)
    said = f"the store still has step {after}, whole"
    yield checked("killed in an upload", after >= newest, said)
    shutil.rmtree(killed.folder)  # another machine has an empty disk
    fetched = launch.run(Task("fetch", "stored", changes=keys))
    if not fetched.is_done:
        yield failed("resumed from the store", fetched)
        return
    first = fetched.facts["first"]
    said = f"an empty disk continues with step {first}, after {after} of the store"
    yield checked("resumed from the store", first == after + 1, said)
    yield same_bits("same bits from the store", whole, fetched)


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
