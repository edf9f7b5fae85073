"""The checks of a proof: each compares what attempts have recorded, and says how it came out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from config.schema import Config
from proving.launch import KILLED, Outcome
from proving.logits import compare_logits, why_not_comparable
from snapshot.disk.checking import check_snapshot
from snapshot.disk.folder import manifest_entries
from snapshot.errors import SnapshotError
from training.distributed.launcher import shutdown_timeout
from training.exits import EXIT_DONE
from training.reporting.console import duration

GREEN, RED, GREY = "green", "red", "grey"
"""It holds; it does not; it could not be checked here."""
LOSS, NORM = 1e-5, 1e-4
"""Bounds of relative differences in float32: sums in another order differ by less."""
TENSORS = ".safetensors"
PLAIN = (TENSORS, ".json", ".jinja", ".txt", ".model")
"""File extensions of data; none of them is executed when it is read."""
FIRST = 2
"""Steps before which a process has not reached its speed."""


@dataclass(frozen=True)
class Line:
    """One check."""

    name: str
    status: str
    said: str
    """What was compared, or why it could not be."""


def passed(name: str, holds: bool, said: str) -> Line:
    """A check without a figure."""
    return Line(name, GREEN if holds else RED, said)


def within(name: str, difference: float, bound: float, said: str) -> Line:
    """A check of a difference; one that is not a number is red."""
    return passed(name, difference <= bound, f"{said}: {difference:.1e}, at most {bound:.0e}")


def unchecked(name: str, why: str) -> Line:
    """A check that is not possible here."""
    return Line(name, GREY, why)


def failed(name: str, found: Outcome, code: int = EXIT_DONE) -> Line:
    """An attempt that ended otherwise than it should."""
    wanted = f", not {code}" if code != EXIT_DONE else ""
    said = f"exit code {found.code}{wanted}: {found.last_words()} ({found.log})"
    return passed(name, False, said)


def largest_difference(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """The largest relative one, over the steps of both; infinite if they have none in common."""
    steps = one.keys() & other.keys()
    if not steps or any(one[step] is None or other[step] is None for step in steps):
        return float("inf")
    return max(abs(one[step] - other[step]) / abs(one[step]) for step in steps)


def text(whole: Outcome, config: Config) -> Iterator[Line]:
    """What is trained on."""
    facts = whole.facts["text"]
    yield passed("first row", True, f"the model learns to write what is in »«: {facts['row']}")
    each, parts = facts["rows"] / whole.facts["step"], whole.facts["parts"]
    most = -(-config.train.global_batch_size // parts)
    said = f"a process computes {each:g} rows a step, at most {most}: one of {parts} parts"
    yield passed("share of a batch", each <= most, said)
    repeated, looked_for = facts["held_out_found"], facts["held_out_looked_for"]
    said = f"{repeated} of {looked_for} held-out rows are in the training text"
    yield within("held-out text", repeated / max(1, looked_for), 0.5, said)
    wrong = facts["misplaced_targets"]
    yield passed("targets", wrong == 0, f"each is the token that follows; {wrong} are not")
    if facts["conversations"]:
        wrong = facts["unended_replies"]
        said = f"each reply is trained on to its end; {wrong} are not"
        yield passed("loss mask", wrong == 0, said)
    else:
        yield unchecked("loss mask", "it is a text: every token is a target")
    said = f"none is lost; {facts['padding_share']:.1%} of the first rows are no targets"
    yield passed("tokens", facts["lost"] is None, facts["lost"] or said)


def contents(folder: Path, is_new: bool, keep: int) -> Iterator[Line]:
    """A snapshot as others find it: whole, without code, the same model for transformers.

    `is_new`: it began with random weights. `keep` such snapshots have room on the disk.
    """
    try:
        check_snapshot(folder)
    except SnapshotError as error:
        yield passed("snapshot is whole", False, str(error))
        return
    entries = manifest_entries(folder)
    yield passed("snapshot is whole", True, f"{len(entries)} files, digests and headers verified")
    other = sorted(path for path in entries if not path.endswith(PLAIN))
    said = "safetensors, JSON and text alone: nothing can run when it is loaded"
    if other:
        said = f"{other[0]} may run when it is loaded"
    yield passed("no code in it", not other, said)
    yield in_transformers(folder, is_new)
    size, free = sum(size for size, _ in entries.values()), shutil.disk_usage(folder).free
    said = f"{keep + 1} snapshots of {size / 1e9:,.3f} GB (snapshot.keep and a new one); "
    yield passed("disk", free > (keep + 1) * size, f"{said}{free / 1e9:,.1f} GB are free")


def in_transformers(folder: Path, is_new: bool) -> Line:
    """Whether transformers computes the same logits from a snapshot."""
    name = "loads in transformers"
    if (reason := why_not_comparable(folder)) is not None:
        return unchecked(name, reason)
    return passed(name, *compare_logits(folder, is_new))


def same_bits(name: str, whole: Outcome, other: Outcome, step: int) -> Line:
    """Weights and optimizer state of two attempts, by the digests of their snapshots' files."""
    try:
        check_snapshot(other.snapshot(step))
    except (OSError, SnapshotError) as error:
        return passed(name, False, f"there is no whole snapshot: {error}")
    first, second = (
        {path: entry for path, entry in entries.items() if path.endswith(TENSORS)}
        for entries in (manifest_entries(found.snapshot(step)) for found in (whole, other))
    )
    said = f"after step {step}, against an undisturbed attempt"
    if differing := sorted(path for path, _ in first.items() ^ second.items()):
        return passed(name, False, f"{differing[0]} differs; {said}")
    size = sum(size for size, _ in first.values())
    return passed(name, True, f"{size / 1e6:,.1f} MB of weights and optimizer state: {said}")


def same_steps(name: str, here: Outcome, other: Outcome, words: str) -> Iterator[Line]:
    """Losses and gradient norms of the first steps of two attempts in float32."""
    if not other.is_done:
        yield failed(f"loss, {name}", other)
        return
    for what, figure, bound in (("loss", "loss", LOSS), ("gradient norm", "grad_norm", NORM)):
        one, two = here.figures(figure), other.figures(figure)
        said = f"{len(one.keys() & two.keys())} steps in float32 against {words}"
        yield within(f"{what}, {name}", largest_difference(one, two), bound, said)


def ended(name: str, found: Outcome, code: int, config: Config) -> Line:
    """Whether an attempt ended as it should; a stopped one leaves a snapshot."""
    if found.code != code:
        return failed(name, found, code)
    if code == KILLED:
        return Line(name, GREEN, "the next attempt resumes")
    if not found.snapshot(step := found.facts["step"]).exists():
        return passed(name, False, f"the attempt left no snapshot of step {step}, its last")
    said = f"left a snapshot of step {step} and exit code {code}"
    if (took := found.facts.get("stop_seconds")) is None:
        return passed(name, True, said)
    allowed = min(config.run.grace_seconds, shutdown_timeout())
    said += f", {took:.1f} s after the signal; it has {allowed:g} s"
    return passed(name, took <= allowed, said)


def speed(whole: Outcome, config: Config) -> Iterator[Line]:
    """Seconds a step, the stall of a snapshot, and the time of the run."""
    facts = whole.facts
    step = median(seconds for at, seconds in facts["step_seconds"].items() if int(at) > FIRST)
    tokens = config.train.global_batch_size * config.data.block_size
    yield Line("speed", GREEN, f"{step:,.3f} s a step, {tokens / step:,.0f} tokens/s")
    stall, durable = median(facts["stalls"]), median(facts["durable"])
    said = f"a snapshot stalls training for {stall:,.3f} s and is on disk after {durable:,.2f} s"
    yield Line("saving", GREEN, said)
    last, minutes = config.train.max_steps, config.snapshot.every_minutes
    every = config.snapshot.every if minutes is None else max(1.0, 60 * minutes / step)
    seconds = duration(last * step + last / every * stall)
    yield Line("whole run", GREEN, f"{last:,} steps: {seconds} without evaluations")
