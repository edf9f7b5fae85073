"""The run killed and stopped in every way, and resumed each time: the same bits in the end."""

from __future__ import annotations

from collections.abc import Iterator

from config.schema import Config
from proving import folders, schedulers
from proving.attempts import Launch
from proving.lines import (
    GREEN,
    Line,
    failed,
    largest_difference,
    passed,
    within,
)
from proving.task import IN_SNAPSHOT, IN_STEP, Outcome, Task
from training.distributed.launcher import shutdown_timeout
from training.exits import EXIT_AGAIN, EXIT_DONE, EXIT_TERMINATED

KILLED = -9
FOLDER = "disturbed"
AT_ONCE = 1e-6
"""A time limit, in minutes, that is over at the first step."""


def resumed(launch: Launch, config: Config, whole: Outcome, steps: int) -> Iterator[Line]:
    """The first steps again, disturbed; `whole` is the undisturbed attempt."""
    ends = [
        ("killed in a step", Task("kill", FOLDER, steps, dies_in=IN_STEP, at=2), KILLED),
        ("killed in a snapshot", Task("kill2", FOLDER, steps, dies_in=IN_SNAPSHOT), KILLED),
        ("SIGTERM", Task("term", FOLDER, steps, sends_sigterm=True), EXIT_TERMINATED),
        ("time limit", Task("limit", FOLDER, steps, {"run.max_minutes": AT_ONCE}), EXIT_AGAIN),
    ]
    done = []
    for name, task, code in ends:
        found = launch.run(task)
        yield ended(name, found, code, config)
        done.append(name)
    found = launch.run(Task("last", FOLDER, steps, fresh=True))
    if found.code != EXIT_DONE:
        yield failed("resumed", found)
        return
    said = ", ".join(done)
    yield same_losses(whole, found, f"{steps} steps: {said}")
    said = f"after step {steps}, against an undisturbed attempt"
    yield folders.same_bits(
        "same bits after all of that", whole.snapshot(steps), found.snapshot(steps), said
    )


def same_losses(whole: Outcome, found: Outcome, said: str) -> Line:
    """Whether two attempts have the same losses, bit for bit, in each step of both."""
    every = whole.losses.keys() == found.losses.keys()
    difference = largest_difference(whole.losses, found.losses) if every else float("inf")
    return within("same losses after all of that", difference, 0.0, said)


def ended(name: str, found: Outcome, code: int, config: Config) -> Line:
    """Whether an attempt ended as it should; a stopped one leaves a snapshot."""
    if found.code != code:
        return failed(name, found, code)
    if code == KILLED:
        return Line(name, GREEN, "the next attempt resumes")
    saved = found.facts.get("saved")
    if saved is None:
        return passed(name, False, "the attempt left no snapshot of its last step")
    said = f"left a snapshot of step {saved} and exit code {code}"
    if (took := found.facts.get("stop_seconds")) is None:
        return passed(name, True, said)
    grace = schedulers.grace()
    allowed = min(config.run.grace_seconds, shutdown_timeout(), grace.seconds)
    said += f", {took:.1f} s after the signal; it has {allowed:g} s{grace.said}"
    return passed(name, took <= allowed, said)
