"""What a run costs: memory and seconds."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from config.schema import Config
from proving.lines import GREEN, Line, unchecked, within
from proving.task import Outcome
from training.reporting.console import duration

MEMORY = 0.02
"""Bound of the relative difference of counted and planned memory."""
FIRST = 2
"""Steps before which a process has not reached its speed."""


def memory(counted: Outcome) -> Line:
    """The peak of a step, as it is planned and counted."""
    peak, planned = counted.facts.get("peak"), counted.facts.get("predicted_peak")
    if not peak or not planned:
        return unchecked("memory as planned", counted.last_words())
    said = f"{peak / 1e6:,.1f} MB of tensors at the peak, plan.py: {planned / 1e6:,.1f} MB"
    return within("memory as planned", abs(peak / planned - 1), MEMORY, said)


def seconds_a_step(whole: Outcome) -> float:
    """The median, of steps after the first ones."""
    steps = whole.facts["step_seconds"]
    later = [seconds for step, seconds in steps.items() if int(step) > FIRST]
    return median(later or steps.values())


def speed(whole: Outcome, config: Config) -> Iterator[Line]:
    """Seconds a step, waits, MFU, the stall of a snapshot, and the time of the run."""
    step, facts = seconds_a_step(whole), whole.facts
    tokens = config.train.global_batch_size * config.data.block_size
    said = f"{step:,.3f} s a step, {tokens / step:,.0f} tokens/s"
    if facts["flops_per_token"] and facts["peak_flops"]:
        used = tokens / step * facts["flops_per_token"] / facts["peak_flops"]
        said += f", MFU {used:.1%}"
    training = sum(facts["clock"][phase] for phase in ("data", "forward and backward", "update"))
    waits = facts["clock"]["data"] / training
    yield Line("speed", GREEN, f"{said}; {waits:.1%} of it waiting for data")
    stall, durable = median(facts["stalls"]), median(facts["durable"])
    yield Line(
        "saving",
        GREEN,
        f"a snapshot stalls training for {stall:,.3f} s and is on disk after {durable:,.2f} s",
    )
    last, minutes = config.train.max_steps, config.snapshot.every_minutes
    every = config.snapshot.every if minutes is None else max(1.0, 60 * minutes / step)
    seconds = duration(last * step + last / every * stall)
    yield Line("whole run", GREEN, f"{last:,} steps: {seconds} without evaluations")
