"""What a run costs: memory, seconds, and how often saving loses least."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from config.schema import Config
from proving.lines import GREEN, Line, unchecked, within
from proving.task import Outcome
from snapshot.interval import USUAL_PER_DAY, Costs, choose_interval, in_words
from training.distributed.environment import machines

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
    """Seconds a step, waits, MFU, the time of the run, and how often to save."""
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
    run, last = config.run, config.train.max_steps
    per_day = run.interruptions_per_day or USUAL_PER_DAY
    source = "run.interruptions_per_day" * (run.interruptions_per_day is not None)
    best = choose_interval(Costs(step, stall, durable), per_day, source or "assumed", last)
    every, named = _interval(config, step, best.steps)
    seconds = last * step + last / every * stall
    said = f"{last:,} steps: {in_words(seconds)} without evaluations"
    if (price := run.price_per_hour) is not None:
        cost = seconds / 3600 * price * machines()
        said += f", {cost:,.2f} at {price:g} an hour for each of {machines()} machine"
        said += "s" * (machines() != 1)
    yield Line("whole run", GREEN, said)
    yield Line("snapshot.every", GREEN, f"it is {named}; auto: {best.reason}")


def _interval(config: Config, step: float, best: int) -> tuple[float, str]:
    """The steps between snapshots of a run whose steps take `step` seconds, and how it says so."""
    every, minutes = config.snapshot.every, config.snapshot.every_minutes
    if minutes is not None:
        return max(1.0, 60 * minutes / step), f"every {minutes:g} minutes"
    return (every, f"{every:,}") if isinstance(every, int) else (best, every)
