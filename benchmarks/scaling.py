"""Speedup of several processes over one, and the bytes that they send to each other.

    OMP_NUM_THREADS=1 python benchmarks/scaling.py

The same global batch on 1, 2 (and 4) CPU processes of one thread each, under DDP and FSDP, in
turns. Bytes are counted at the loopback interface, so no other program should use it meanwhile. The
minimum for n processes: 2(n-1) times the gradients for an all-reduce (Patarasuk & Yuan, 2009); with
shards, (n-1) times the weights before each pass and the gradients after it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from harness import SHAPES, as_words, machine, median, overrides, print_table, save, spread
from turns import Contestant, ours, take_turns

CONFIGS = {"DDP": "ddp_cpu.yaml", "FSDP": "fsdp_cpu.yaml"}
TIMES = {"DDP": 2, "FSDP": 3}
"""How often the bytes of all weights are sent, for each process but one."""


def loopback_bytes() -> int:
    """Bytes received at the loopback interface since the machine was started."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[0]) for line in lines if line.strip()[:3] == "lo:")


def start_runs(shape: dict[str, int], counts: list[int], folder: Path) -> dict[str, Contestant]:
    words = [*overrides(shape), "train.log_every=1000"]
    float32 = "--mixed_precision=no"
    found = {"1 process": ours("one", "cpu.yaml", words, folder, (float32,))}
    for port, count in enumerate(counts, start=29700):
        for strategy, config in CONFIGS.items():
            options = (float32, f"--num_processes={count}", f"--main_process_port={port}")
            name = f"{strategy} on {count}"
            found[name] = ours(name.replace(" ", "-"), config, words, folder, options)
    return found


def main() -> None:
    """Print a row for each strategy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="large", choices=sorted(SHAPES))
    parser.add_argument("--batch", type=int, help="sequences a step, instead of the shape's")
    parser.add_argument("--processes", type=int, nargs="+", default=[2])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    shape = {**SHAPES[options.shape], **({"batch": options.batch} if options.batch else {})}
    print(as_words(machine()))
    sent: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        runs = start_runs(shape, options.processes, Path(folder))
        try:
            take_turns(list(runs.values()), options.steps, options.turns, warm_up=3)
            for name, run in runs.items():
                before = loopback_bytes()
                run.run_steps(options.steps, warm_up=True)
                sent[name] = (loopback_bytes() - before) / options.steps
        finally:
            for run in runs.values():
                run.end()
    rows, figures = [], []
    base = runs["1 process"]
    for name, run in runs.items():
        count = 1 if run is base else int(name.split()[-1])
        speedups = [one / several for one, several in zip(base.seconds, run.seconds, strict=True)]
        least = 0 if run is base else TIMES[name.split()[0]] * (count - 1) * 4
        least *= base.facts["parameters"]
        figure: dict[str, Any] = {"name": name, "seconds": run.seconds, "faster": speedups}
        figures.append({**figure, "bytes_a_step": sent[name], "minimum": least})
        rows.append(
            (
                name,
                spread([1e3 * value for value in run.seconds], 0),
                spread(speedups, 2),
                f"{median(speedups) / count:.0%}",
                f"{sent[name] / 1e6:.1f}",
                f"{least / 1e6:.1f}",
            )
        )
    print(f"\n{options.shape}: {shape}, {options.turns} turns of {options.steps} steps")
    print_table(
        ("", "ms a step", "times one process", "efficiency", "MB sent a step", "minimum"), rows
    )
    save("scaling", figures)


if __name__ == "__main__":
    main()
