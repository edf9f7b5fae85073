"""What snapshots and their upload cost a run: real runs of train.py, interleaved, one thread each.

    python benchmarks/snapshots.py disk [--every 100] [--pairs 4] [--precision bf16]
    python benchmarks/snapshots.py hub [--pairs 4] [--steps 60]
    python benchmarks/snapshots.py history [--pairs 9] [--shape small]
    python benchmarks/snapshots.py verify [--pairs 9] [--shape large]

`disk`: a run that writes a snapshot every so many steps beside one that writes none, in turns of as
many steps; and what a run says of how long one holds it, and how long it takes to be on the disk.
`--every 10 --pairs 30` measures closely what one costs: long turns of a machine differ by more.
`hub`: a run with a loopback Hub that takes its time, beside the same run without; both write a
snapshot every 20 steps. The time is that of the loop, snapshots included.
`history`: what a snapshot and a resume take after 100, 10,000 and 1,000,000 steps. `verify`: what
looking at a snapshot's numbers adds to hashing its files.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import (
    ROOT,
    SHAPES,
    as_words,
    launch,
    machine,
    median,
    overrides,
    print_table,
    save,
    spread,
)
from history import histories, verifications
from turns import ours, take_turns

EVERY = 20
LONG = 130
"""Steps of a run whose snapshots are timed: files are mostly written where others have been."""
LATENCY = ("0.05", "2.0")


def words(folder: Path, steps: int, *more: str) -> list[str]:
    """6 layers, 384 wide, context 256, batch 8: snapshots of about 130 MB, every 20 steps."""
    return [
        *overrides(SHAPES["large"]),
        f"train.max_steps={steps}",
        f"train.log_every={EVERY}",
        f"train.eval_every={steps}",
        "train.eval_batches=1",
        "train.sample_every=0",
        f"snapshot.every={EVERY}",
        f"run.dir={folder}",
        "data.cache_dir=out/data",
        "optim.warmup_steps=10",
        *more,
    ]


def timed(command: list[str], steps: int, environment: dict[str, str]) -> tuple[float, str]:
    """Seconds from the figures of step 20 to those of the last step, and what was printed."""
    at: dict[int, float] = {}
    printed = ""
    with subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            printed += line
            if found := re.match(r"step (\d+)/", line):
                at[int(found[1])] = time.perf_counter()
    if process.returncode:
        sys.exit(printed)
    return at[steps] - at[EVERY], printed


def waited(printed: str) -> tuple[float, float]:
    """Seconds for which a snapshot held the run, and until it was on the disk: medians."""
    held, durable = re.findall(
        r"stalls training for ([\d.]+) s and is durable after ([\d.]+) s", printed
    )[0]
    return float(held), float(durable)


def on_disk(options: argparse.Namespace) -> None:
    """Print what snapshots on this disk cost the loop."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        launched = (f"--mixed_precision={options.precision}",)
        without = [*overrides(SHAPES["large"]), "snapshot.keep=2"]
        saving = [*without, f"snapshot.every={options.every}"]
        runs = [
            ours("with", "cpu.yaml", saving, folder, launched),
            ours("without", "cpu.yaml", without, folder, launched),
        ]
        try:
            take_turns(runs, options.every, options.pairs, warm_up=5)
        finally:
            for run in runs:
                run.end()
        often = words(folder / "often", LONG)
        command = launch("cpu.yaml", "train.py", *often, options=launched)
        _, printed = timed(command, LONG, {**os.environ, "PYTHONWARNINGS": "ignore"})
        written = folder / "often" / "snapshots" / f"step-{LONG:08d}"
        gigabytes = sum(file.stat().st_size for file in written.iterdir()) / 1e9
    held, durable = waited(printed)
    seconds = [[options.every * value for value in run.seconds] for run in runs]
    lost = [a / b - 1 for a, b in zip(*seconds, strict=True)]
    costs = [a - b for a, b in zip(*seconds, strict=True)]
    error = statistics.stdev(costs) / len(costs) ** 0.5 if len(costs) > 1 else math.nan
    print_table(
        (
            "with, s",
            "without, s",
            "lost",
            "one costs, s (mean ± standard error)",
            "MB a snapshot",
            "held, s (per GB)",
            "on disk, s (per GB)",
        ),
        [
            (
                spread(seconds[0], 1),
                spread(seconds[1], 1),
                f"{median(lost):.2%} ({min(lost):.2%} to {max(lost):.2%})",
                f"{statistics.mean(costs):.2f} ± {error:.2f}",
                f"{gigabytes * 1e3:.0f}",
                f"{held:.2f} ({held / gigabytes:.1f})",
                f"{durable:.2f} ({durable / gigabytes:.1f})",
            )
        ],
    )
    found = {"held_seconds": held, "durable_seconds": durable, "bytes": gigabytes * 1e9}
    save("snapshots-disk", {"every": options.every, "seconds": seconds, **found})


def main() -> None:
    """Print a line for each pair, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("disk", "hub", "history", "verify"))
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60, help="of a run beside a Hub")
    parser.add_argument("--every", type=int, default=100, help="steps between two, on disk")
    parser.add_argument("--precision", default="no", choices=("no", "bf16"))
    parser.add_argument("--shape", default="small", choices=SHAPES, help="of history and verify")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(as_words(machine()))
    if options.kind in ("history", "verify"):
        measure = histories if options.kind == "history" else verifications
        measure(options.pairs, options.shape)
    elif options.kind == "disk":
        on_disk(options)
    else:
        beside_a_hub(options)


def beside_a_hub(options: argparse.Namespace) -> None:
    """Print what uploads cost the loop."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    train = [sys.executable, str(ROOT / "train.py")]
    ratios: list[float] = []
    waits: list[float] = []
    with tempfile.TemporaryDirectory() as place:
        server = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/loopback_hub.py"), place, "--latency", *LATENCY],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert server.stdout is not None
        there = dict(server.stdout.readline().strip().split("=", 1) for _ in range(2))
        try:
            for pair in range(options.pairs):
                seconds = {}
                for kind in ("without", "with") if pair % 2 else ("with", "without"):
                    hub = [f"hub.repo_id=me/run{pair}", "hub.min_interval_seconds=0"]
                    folder = Path(place) / f"{kind}-{pair}"
                    more = hub if kind == "with" else []
                    command = [*train, *words(folder, options.steps, *more)]
                    seconds[kind], printed = timed(command, options.steps, environment | there)
                    waits.append(waited(printed)[0])
                    if kind == "with":
                        print(re.findall(r"hub at step .*old", printed)[-1])
                ratios.append(seconds["with"] / seconds["without"])
                print(
                    f"pair {pair + 1}: {seconds['without']:.1f} s without, {seconds['with']:.1f} s "
                    f"with a Hub of {LATENCY[0]} to {LATENCY[1]} s a request: {ratios[-1]:.3f}; "
                    f"the loop waits {waits[-1]:.2f} s for a snapshot",
                    flush=True,
                )
        finally:
            server.terminate()
            server.wait()
    print(
        f"median {statistics.median(ratios):.3f}, spread {min(ratios):.3f} to {max(ratios):.3f}; "
        f"held {statistics.median(waits):.2f} s a snapshot"
    )
    save("snapshots-hub", {"ratios": ratios, "held_seconds": waits})


if __name__ == "__main__":
    main()
