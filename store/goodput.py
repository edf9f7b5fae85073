"""Where the time of a run went, over all of its attempts and machines, from its events.

Each attempt leaves one reading of its clock among the events of the run, and replaces it at each
snapshot and at its end: an event `clock`. Events travel with the store, so the sums survive disks
and machines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

START, DATA, PASSES, UPDATE = "start", "data", "forward and backward", "update"
SNAPSHOT, EVALUATION, UPLOAD, END = "snapshot", "evaluation and sample", "upload", "end"
PHASES = (START, DATA, PASSES, UPDATE, SNAPSHOT, EVALUATION, UPLOAD, END)
"""The phase of the upload is the wait for the last one; others run in the background."""
CLOCK = "clock"
"""The kind of the events that hold readings."""
SAME_LAUNCH_SECONDS = 2.0
"""Attempts whose launches differ by less have one launcher."""
NUMBER = r"\d{1,12}(?:\.\d{1,9})?"
READING = re.compile(
    r"steps (?P<first>\d{1,13}) to (?P<read_at>\d{1,13}) on (?P<machines>\d{1,6}) machines?, "
    rf"launched at (?P<launched>{NUMBER}), begun (?P<waited>{NUMBER}) s later: "
    rf"(?P<phases>[a-z]+(?: [a-z]+)* {NUMBER}(?:, [a-z]+(?: [a-z]+)* {NUMBER})*)"
    rf"(?:; silent for (?P<silent>{NUMBER}) s)?"
)
"""The text of such an event."""
USEFUL, LOST, WAITING = "steps in the model", "steps lost and redone", "waiting"
SAVING, EVALUATING, STARTING = "saving", EVALUATION, "starts and restarts"
HOUR = 3600.0


@dataclass(frozen=True)
class Reading:
    """The clock of one attempt, and its last sign of life."""

    attempt: str
    """The first 8 digits of its id."""
    first: int
    """The step that it began after."""
    step: int
    """The newest step that is known of it."""
    read_at: int
    """The newest step when the clock was read."""
    machines: int
    launched: float
    """When its launcher started, in Unix seconds."""
    waited: float
    """Seconds from then until its process started: imports, or the attempts before it."""
    seconds: Mapping[str, float]
    """Of each of `PHASES`, from the start of its process until the clock was read."""
    silent: float = 0.0
    """Seconds from the reading to the last sign of life of an attempt that was killed."""
    ended: bool = False
    """Whether the attempt stopped by itself, with a snapshot."""

    @property
    def begun(self) -> float:
        """When its process started, in Unix seconds."""
        return self.launched + self.waited

    @property
    def seen(self) -> float:
        """When it gave its last sign of life, in Unix seconds."""
        return self.begun + sum(self.seconds.values()) + self.silent

    def as_text(self) -> str:
        """The text of its event."""
        phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in self.seconds.items())
        return (
            f"steps {self.first} to {self.read_at} on {self.machines} "
            f"machine{'s' * (self.machines != 1)}, launched at {self.launched:.3f}, begun "
            f"{max(0.0, self.waited):.3f} s later: {phases}"
            + f"; silent for {self.silent:.3f} s"
            * (self.silent > 0)
        )


def readings_in(events: Iterable[Mapping[str, Any]]) -> list[Reading]:
    """The last reading of each attempt, in the order in which they began."""
    found: dict[str, Reading] = {}
    ended = set()
    for event in events:
        if event["event"] in ("stop", "end"):
            ended.add(event["attempt"])
        reading = _reading_in(event) if event["event"] == CLOCK else None
        if reading is not None:
            before = found.get(reading.attempt)
            if before is None or before.seen <= reading.seen:
                found[reading.attempt] = reading
    ordered = sorted(found.values(), key=lambda one: (one.begun, one.attempt))
    return [replace(one, ended=one.attempt in ended) for one in ordered]


def _reading_in(event: Mapping[str, Any]) -> Reading | None:
    match = READING.fullmatch(event["text"])
    if match is None:
        return None
    words = (phase.rsplit(" ", 1) for phase in match["phases"].split(", "))
    seconds = {name: float(number) for name, number in words if name in PHASES}
    first, read_at = int(match["first"]), int(match["read_at"])
    step = max(first, read_at, event["step"])
    return Reading(
        event["attempt"],
        first,
        step,
        max(first, read_at),
        max(1, int(match["machines"])),
        float(match["launched"]),
        float(match["waited"]),
        seconds,
        float(match["silent"] or 0),
    )


@dataclass(frozen=True)
class Goodput:
    """What the seconds of all machines went into, since the run began, while one was held.

    A machine is held from the start of its launcher to the last sign of life of the launcher's last
    attempt. Nobody sees what a machine costs before and after, nor how long one that died without a
    word lived on after its last line of metrics or its last upload.
    """

    seconds: Mapping[str, float]
    """Machine-seconds by what they went into; their sum is all of them."""
    attempts: int
    interruptions: int
    """Attempts that were killed, or failed, without a snapshot of their last step."""
    steps_lost: int
    """Steps that were done again."""

    @property
    def total(self) -> float:
        """All machine-seconds."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """The goodput: the part of them in forward, backward and update of steps in the model."""
        return self.seconds[USEFUL] / self.total if self.total else 0.0

    def in_words(self) -> str:
        """For one line: '93.1% of 0.23 machine-hours; 2 interruptions, 37 steps done again'."""
        cut = f"{self.interruptions:,} interruption{'s' * (self.interruptions != 1)}"
        return (
            f"{self.share:.1%} of {in_hours(self.total)} in {self.attempts:,} "
            f"attempt{'s' * (self.attempts != 1)}; {cut}, {self.steps_lost:,} "
            f"step{'s' * (self.steps_lost != 1)} done again"
        )

    def table(self) -> list[str]:
        """A line for each kind of time: machine-seconds and share."""
        rows = [*self.seconds.items(), ("all", self.total)]
        return [
            f"{name:<22} {took:>9,.1f} s {took / (self.total or 1):>7.1%}" for name, took in rows
        ]


def in_hours(machine_seconds: float) -> str:
    """'0.23 machine-hours', or seconds below a minute."""
    if machine_seconds < 60:
        return f"{machine_seconds:,.1f} machine-seconds"
    return f"{machine_seconds / HOUR:,.2f} machine-hours"


def goodput_of(events: Iterable[Mapping[str, Any]]) -> Goodput | None:
    """What the time of a run went into; None where no attempt has left a reading.

    Steps of an attempt count as useful up to the step that the next one resumed from.
    """
    readings = readings_in(events)
    if not readings:
        return None
    sums = dict.fromkeys((USEFUL, LOST, WAITING, SAVING, EVALUATING, STARTING), 0.0)
    steps_lost = 0
    for (reading, gap), kept in zip(_held(readings), _kept_steps(readings), strict=True):
        useful, lost = _steps_of(reading, kept)
        phases = {name: reading.seconds.get(name, 0.0) for name in PHASES}
        for name, seconds in (
            (USEFUL, useful),
            (LOST, lost),
            (WAITING, phases[DATA] + phases[UPLOAD]),
            (SAVING, phases[SNAPSHOT]),
            (EVALUATING, phases[EVALUATION]),
            (STARTING, gap + phases[START] + phases[END]),
        ):
            sums[name] += reading.machines * seconds
        steps_lost += reading.step - reading.first - kept
    return Goodput(sums, len(readings), _interruptions(readings), steps_lost)


def _steps_of(reading: Reading, kept: int) -> tuple[float, float]:
    """Seconds of the first `kept` steps of an attempt, and of what was lost with the others.

    All steps of an attempt count alike. What came after the last reading was lost.
    """
    seconds = reading.seconds.get(PASSES, 0.0) + reading.seconds.get(UPDATE, 0.0)
    taken, all_taken = reading.read_at - reading.first, reading.step - reading.first
    each = seconds / taken if taken else reading.silent / max(1, all_taken)
    useful = min(each * kept, seconds + reading.silent)
    return useful, seconds + reading.silent - useful


def _kept_steps(readings: Sequence[Reading]) -> list[int]:
    """How many steps of each attempt are in the model."""
    kept, last = [], math.inf
    for reading in reversed(readings):
        kept.append(int(max(0, min(reading.step, last) - reading.first)))
        last = min(last, reading.first)
    return kept[::-1]


def _held(readings: Sequence[Reading]) -> Iterator[tuple[Reading, float]]:
    """Each attempt, with the seconds for which its machines were held before its process started.

    That is since the start of the launcher, or since the attempt before under the same launcher.
    """
    launches: list[list[float]] = []
    for reading in readings:
        same = (one for one in launches if abs(one[0] - reading.launched) <= SAME_LAUNCH_SECONDS)
        if (launch := next(same, None)) is None:
            launches.append(launch := [reading.launched, reading.launched])
        yield reading, max(0.0, reading.begun - launch[1])
        launch[1] = max(launch[1], reading.seen)


def _interruptions(readings: Sequence[Reading]) -> int:
    """The newest attempt may still be alive."""
    return sum(not reading.ended for reading in readings[:-1])
