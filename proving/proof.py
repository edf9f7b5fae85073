"""The proof: which attempts are made, in which order, and the checks of each."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from config.schema import Config
from proving import checks
from proving.attempt import IN_SNAPSHOT, IN_STEP, STEPS
from proving.checks import Line, failed, unchecked, within
from proving.launch import KILLED, Launch, Outcome, Task
from proving.stores import stored
from training.exits import EXIT_AGAIN, EXIT_TERMINATED

FEW = 2
"""Steps that are compared between shapes, and sequences of their other micro-batches."""
SEQUENCES = 8
"""The most of a step that a process computes then: fewer may have the same number of targets, so
that nobody sees how micro-batches are weighed."""
AT_ONCE = 1e-6
"""A time limit, in minutes, that is over at the first step."""
RUNS = ("undisturbed", "shape", "split", "one", "other", "disturbed", "stored", "memory")
"""Folders of the runs of attempts."""


@dataclass
class Proof:
    """Makes the attempts, and yields a line for each check."""

    launch: Launch
    config: Config
    """That of the real run."""
    first_row: list[list[Any]] = field(default_factory=list)
    """Of the training text: pieces, each with whether the model learns to write it."""
    machine: str = "an unknown machine"
    """What the first attempt has computed on."""

    def lines(self) -> Iterator[Line]:
        """All checks. They need no other one, unless it is an attempt that failed."""
        whole = self.launch.run(Task("undisturbed", "undisturbed", STEPS, describes_run=True))
        if not whole.is_done:
            yield failed("the first steps", whole)
            return
        self.first_row, self.machine = whole.facts["text"]["first_row"], whole.facts["machine"]
        yield from checks.text(whole)
        is_new = self.config.model.pretrained is None
        yield from checks.contents(whole.snapshot(STEPS), is_new, self.config.snapshot.keep)
        yield from self.any_shape(self.few_sequences(whole))
        self.remove("shape", "split", "one", "other")
        yield from self.resumed(whole)
        self.remove("disturbed")
        yield from stored(self.launch, self.config, whole)
        yield checks.memory(self.launch.run(Task("memory", "memory", FEW, counts_memory=True)))
        yield from checks.speed(whole, self.config)

    def few_sequences(self, whole: Outcome) -> dict[str, Any]:
        """Keys for few sequences a process, with as uneven shares as the run has."""
        parts, batch = whole.facts["parts"], self.config.train.global_batch_size
        few = min(batch, SEQUENCES * parts + batch % parts)
        return {"train.global_batch_size": few, "train.micro_batch_size": 1}

    def any_shape(self, changes: Mapping[str, Any]) -> Iterator[Line]:
        """One run, any shape: the first steps split otherwise, and in one process."""
        processes, name = self.launch.processes, "one process"
        kept = {**changes, "snapshot.keep": FEW + 1}
        here = self.launch.run(Task("shape", "shape", 2 * FEW, kept, in_float32=True))
        if not here.is_done:
            yield failed("the first steps in float32", here)
            return
        yield checks.moved(here.snapshot(FEW), here.snapshot(2 * FEW))
        if changes["train.global_batch_size"] >= FEW:
            other = {**changes, "train.micro_batch_size": FEW}
            split = self.launch.run(Task("split", "split", FEW, other, in_float32=True))
            words = f"micro-batches of {FEW}, not 1"
            yield from self.compared("split otherwise", here, split, words)
        else:
            yield unchecked("loss, split otherwise", "a step has one sequence")
        if processes == 1:
            yield unchecked("resumed on one process", "one process was launched")
            return
        one = self.launch.run(Task("one", "one", FEW, changes, alone=True, in_float32=True))
        if not one.is_done and (one.code == KILLED or "memory" in one.last_words()):
            yield unchecked("resumed on one process", f"it cannot hold all: {one.last_words()}")
            return
        yield from self.compared(name, here, one, f"one process, not {processes}")
        resumed = self.launch.folder / "other" / here.snapshot(FEW).relative_to(here.folder)
        shutil.copytree(here.snapshot(FEW), resumed)
        task = Task("other", "other", 2 * FEW, changes, alone=True, in_float32=True)
        other_outcome = self.launch.run(task)
        if not other_outcome.is_done:
            yield failed("resumed on one process", other_outcome)
            return
        losses = (outcome.figures("loss") for outcome in (other_outcome, here))
        said = f"steps {FEW + 1} to {2 * FEW}, from the snapshot of {processes} processes"
        difference = checks.largest_difference(*losses)
        yield within("resumed on one process", difference, checks.LOSS, said)

    def compared(self, name: str, here: Outcome, other: Outcome, words: str) -> Iterator[Line]:
        """The first steps of two attempts, unless the other one failed."""
        if other.is_done:
            yield from checks.same_steps(name, here, other, words)
        else:
            yield failed(f"loss, {name}", other)

    def resumed(self, whole: Outcome) -> Iterator[Line]:
        """The first steps again, killed and stopped in every way, with the same bits in the end."""
        run, soon = "disturbed", {"run.max_minutes": AT_ONCE}
        ends = (
            ("killed in a step", Task("kill", run, STEPS, dies_in=IN_STEP, at=2), KILLED),
            ("killed in a snapshot", Task("kill2", run, STEPS, dies_in=IN_SNAPSHOT), KILLED),
            ("SIGTERM", Task("term", run, STEPS, sends_sigterm=True), EXIT_TERMINATED),
            ("time limit", Task("limit", run, STEPS, soon), EXIT_AGAIN),
        )
        for name, task, code in ends:
            yield checks.ended(name, self.launch.run(task), code, self.config)
        last = self.launch.run(Task("last", run, STEPS, fresh=True))
        if not last.is_done:
            yield failed("resumed", last)
            return
        one, two = whole.figures("loss"), last.figures("loss")
        # Bit for bit, in each step of both.
        same = checks.largest_difference(one, two) if one.keys() == two.keys() else float("inf")
        said = f"{STEPS} steps: {', '.join(name for name, *_ in ends)}"
        yield within("same losses after all of that", same, 0.0, said)
        said = f"after step {STEPS}, against an undisturbed attempt"
        yield checks.same_bits(
            "same bits after all of that", whole.snapshot(STEPS), last.snapshot(STEPS), said
        )

    def remove(self, *runs: str) -> None:
        """Remove what attempts have written, but for their logs."""
        for name in runs or RUNS:
            with suppress(OSError):
                shutil.rmtree(self.launch.folder / name)
