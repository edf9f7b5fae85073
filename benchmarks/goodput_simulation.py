"""Goodput of machines and models that are not here, from a simulation of interruptions.

    python benchmarks/goodput_simulation.py [--days 30] [--seed 1] [--picture FILE]

A machine is interrupted after an exponential time (mean `--hours`), so a run of N machines loses
one N times as often; another takes its place after `replace_seconds`. What that costs depends on
how the run saves and restarts:

- `saves, then trains`: a checkpoint stalls the steps until it is stored. After a loss the run waits
  for the replacement, and goes back to the last checkpoint.
- `saves while it trains`: a checkpoint stalls the steps only for its copy, and counts once it is
  stored. After a loss as above.
- `machines go on`: the same, but those that are left train until the replacement joins: two
  restarts, no waiting. Where each GPU has all weights, gradients and moments (DDP: 16 bytes a
  parameter within 80 GB), no step is lost; else (FSDP) it goes back to the last stored snapshot.

Each saves at the interval that loses least (Daly, 2006): sqrt(2 x cost x mean time between losses),
cost being what a checkpoint stalls. A run that waits pays for its idle machines. Left out: losses
during a restart, which begin it again (so from 256 machines on the figures are upper bounds),
preemption notices, which save the steps since the last checkpoint, stores and networks that slow
down, and steps that become slower with N.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MACHINES = (1, 4, 16, 64, 256, 1024)
BILLIONS = (1, 7, 13, 70)
SYNCHRONOUS, BACKGROUND, ELASTIC = "saves, then trains", "saves while it trains", "machines go on"
DAY = 86_400.0
GPU_BYTES, BYTES_WHOLE = 80e9, 16
"""Memory of a GPU; bytes of a parameter with its gradient and moments."""


@dataclass(frozen=True)
class Costs:
    """What a checkpoint and a restart cost. The defaults are assumptions."""

    hours: float = 24.0
    """Mean time until a machine is interrupted."""
    bytes_per_parameter: float = 12.0
    """Of a checkpoint: float32 weights and two moments."""
    store_bytes_per_second: float = 1e9
    """Of a machine, to and from the store; each has its part of the state."""
    copy_bytes_per_second: float = 10e9
    """Of a machine, from its GPUs into its memory."""
    restart_seconds: float = 60.0
    """From the end of a group of processes to the next one's first step, without the state: as
    measured, a change of membership takes one start, whose length depends on the machine."""
    detect_seconds: float = 8.0
    """`run.collective_timeout_seconds`, which a machine without power takes to be noticed."""
    replace_seconds: float = 120.0
    """Until another machine is there."""

    def stored(self, parameters: float, machines: int) -> float:
        """Seconds to write or read the state."""
        return self.bytes_per_parameter * parameters / machines / self.store_bytes_per_second

    def copied(self, parameters: float, machines: int) -> float:
        """Seconds to copy it."""
        return self.bytes_per_parameter * parameters / machines / self.copy_bytes_per_second


def interval(stall: float, mean: float) -> float:
    """The seconds between checkpoints that lose least (Daly, 2006): at least those of a stall."""
    return max(stall, math.sqrt(2 * stall * mean))


def simulate(
    way: str, parameters: float, machines: int, costs: Costs, seconds: float, seed: int
) -> float:
    """The share of a run's machine time that is in its model, over so many seconds."""
    draw = random.Random(f"{seed} {parameters} {machines}")  # each way has the same losses
    mean = costs.hours * 3600 / machines
    stored, copied = costs.stored(parameters, machines), costs.copied(parameters, machines)
    stall = stored if way == SYNCHRONOUS else copied
    every = interval(stall, mean)
    if way != SYNCHRONOUS:
        every = max(every, stored)  # one is stored at a time
    restart = costs.restart_seconds + stored
    down = costs.detect_seconds + restart
    is_whole = parameters * BYTES_WHOLE <= GPU_BYTES and machines > 1
    if way == ELASTIC and machines > 1:
        down += restart  # when the replacement joins
    else:
        down += costs.replace_seconds
    now = useful = 0.0
    while now < seconds:
        up = min(draw.expovariate(1 / mean), seconds - now)
        ends = now + up >= seconds
        of_steps = up * every / (every + stall)
        useful += of_steps if ends else kept(way, is_whole, up, every, stall, stored)
        now += up + down
    return useful / max(now, seconds)


def kept(way: str, is_whole: bool, up: float, every: float, stall: float, stored: float) -> float:
    """Of so many seconds until a loss, those of steps that it leaves."""
    if way == ELASTIC and is_whole:
        return up * every / (every + stall)
    rounds, left = divmod(up, every + stall)
    if way != SYNCHRONOUS and left < stored:
        rounds -= 1  # the last checkpoint is not stored yet
    return max(0.0, rounds) * every


def table(costs: Costs, days: float, seed: int) -> list[dict[str, Any]]:
    """The goodput of every way, size and number of machines that can hold the model."""
    return [
        {
            "way": way,
            "billions": billions,
            "machines": machines,
            "goodput": simulate(way, billions * 1e9, machines, costs, days * DAY, seed),
        }
        for way in (SYNCHRONOUS, BACKGROUND, ELASTIC)
        for billions in BILLIONS
        for machines in MACHINES
    ]


def draw_picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Goodput by the number of machines, a panel for each size of model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    panels = figure.subplots(1, len(BILLIONS), sharey=True)
    for panel, billions in zip(panels, BILLIONS, strict=True):
        for way in (SYNCHRONOUS, BACKGROUND, ELASTIC):
            of = [row for row in rows if (row["way"], row["billions"]) == (way, billions)]
            panel.plot([row["machines"] for row in of], [row["goodput"] for row in of], label=way)
        panel.set_xscale("log", base=4)
        panel.set_xticks(MACHINES, [str(one) for one in MACHINES])
        panel.set_title(f"{billions} B parameters")
        panel.set_xlabel("machines")
        panel.set_ylim(0, 1)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("goodput")
    panels[0].legend(loc="lower left", fontsize="small")
    figure.savefig(path, dpi=120)


def print_rows(rows: list[dict[str, Any]], print_table: Callable[..., None]) -> None:
    """A line for each way and size."""
    lines = []
    for way in (SYNCHRONOUS, BACKGROUND, ELASTIC):
        for billions in BILLIONS:
            of = [row for row in rows if (row["way"], row["billions"]) == (way, billions)]
            lines.append([way, f"{billions} B", *(f"{row['goodput']:.1%}" for row in of)])
    print_table(["way", "parameters", *map(str, MACHINES)], lines)


def main() -> None:
    """Print the table; draw the picture."""
    from common import print_table, save

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hours", type=float, default=Costs.hours, help="mean until a loss")
    parser.add_argument("--restart", type=float, default=Costs.restart_seconds, help="s")
    parser.add_argument("--detect", type=float, default=Costs.detect_seconds, help="s")
    parser.add_argument("--picture", type=Path, default=None)
    options = parser.parse_args()
    costs = Costs(options.hours, restart_seconds=options.restart, detect_seconds=options.detect)
    rows = table(costs, options.days, options.seed)
    print_rows(rows, print_table)
    if options.picture is not None:
        draw_picture(rows, options.picture)
    save("goodput_simulation", rows)


if __name__ == "__main__":
    main()
