"""The cost of snapshots and their uploads: real runs of train.py, interleaved, one thread each.

    python benchmarks/snapshots.py disk [--every 100] [--pairs 4] [--precision bf16]
    python benchmarks/snapshots.py hub [--pairs 4] [--steps 60]
    python benchmarks/snapshots.py shards [--pairs 2] [--model gpt2_large] [--ways shards gathered]

`disk`: a run that writes a snapshot every `--every` steps compared with one that writes none, in
turns of as many steps; and the stall and the time until a snapshot is durable, as the run prints.
`--every 10 --pairs 30` is more precise, because the machine's speed varies less in short turns.
`hub`: a run with a slow loopback Hub (Xet, 50 ms to 2 s a request, 5 MB/s) compared with the same
run without; both write a snapshot every 20 steps. The time is that of the loop, snapshots included;
CPU seconds and memory are those of the whole process.
`shards`: a large model on two processes under FSDP, see benchmarks/shards.py; it needs as much
memory and disk as twice the model's state.
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
from typing import NamedTuple

from harness import (
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
from shards import WAYS
from shards import measure as measure_shards
from turns import ours, take_turns

EVERY = 20
LONG = 130
"""Steps of a run whose snapshots are timed: most of them reuse disk space of earlier ones."""
LATENCY = ("0.05", "2.0")
BANDWIDTH = "5"
"""MB/s of the loopback Hub."""


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


class Run(NamedTuple):
    """A run of train.py that has ended."""

    seconds: float
    """From the line of step 20 to the line of the last step."""
    printed: str
    cpu_seconds: float
    peak_bytes: int


def timed(command: list[str], steps: int, environment: dict[str, str]) -> Run:
    """Start a run and wait for its end."""
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
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(printed)
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return Run(at[steps] - at[EVERY], printed, cpu_seconds, usage.ru_maxrss << 10)


def stall_and_durable(printed: str) -> tuple[float, float]:
    """Median seconds that a snapshot stalls the run, and until it is durable."""
    stall, durable = re.findall(
        r"stalls training for ([\d.]+) s and is durable after ([\d.]+) s", printed
    )[0]
    return float(stall), float(durable)


def on_disk(options: argparse.Namespace) -> None:
    """Print the cost of snapshots on this disk."""
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
        printed = timed(command, LONG, {**os.environ, "PYTHONWARNINGS": "ignore"}).printed
        written = folder / "often" / "snapshots" / f"step-{LONG:08d}"
        gigabytes = sum(file.stat().st_size for file in written.iterdir()) / 1e9
    stall, durable = stall_and_durable(printed)
    seconds = [[options.every * value for value in run.seconds] for run in runs]
    slowdowns = [a / b - 1 for a, b in zip(*seconds, strict=True)]
    costs = [a - b for a, b in zip(*seconds, strict=True)]
    error = statistics.stdev(costs) / len(costs) ** 0.5 if len(costs) > 1 else math.nan
    print_table(
        (
            "with, s",
            "without, s",
            "lost",
            "one costs, s (mean ± standard error)",
            "MB a snapshot",
            "stall, s (per GB)",
            "durable, s (per GB)",
        ),
        [
            (
                spread(seconds[0], 1),
                spread(seconds[1], 1),
                f"{median(slowdowns):.2%} ({min(slowdowns):.2%} to {max(slowdowns):.2%})",
                f"{statistics.mean(costs):.2f} ± {error:.2f}",
                f"{gigabytes * 1e3:.0f}",
                f"{stall:.2f} ({stall / gigabytes:.1f})",
                f"{durable:.2f} ({durable / gigabytes:.1f})",
            )
        ],
    )
    found = {"stall_seconds": stall, "durable_seconds": durable, "bytes": gigabytes * 1e9}
    save("snapshots-disk", {"every": options.every, "seconds": seconds, **found})


def main() -> None:
    """Print a line for each pair, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("disk", "hub", "shards"))
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60, help="of a run with a Hub")
    parser.add_argument("--every", type=int, default=100, help="steps between two, on disk")
    parser.add_argument("--precision", default="no", choices=("no", "bf16"))
    parser.add_argument("--model", default="gpt2_large", help="of shards")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS, help="of shards")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(as_words(machine()))
    if options.kind == "shards":
        measure_shards(options.model, options.pairs, options.ways)
    elif options.kind == "disk":
        on_disk(options)
    else:
        with_hub(options)


def with_hub(options: argparse.Namespace) -> None:
    """Print the cost of uploads."""
    train = [sys.executable, str(ROOT / "train.py")]
    ratios, stalls, cpu, memory = [], [], [], []
    with tempfile.TemporaryDirectory() as place:
        environment = {**os.environ, "PYTHONWARNINGS": "ignore", "HF_HUB_DISABLE_TELEMETRY": "1"}
        environment |= {"HF_XET_CACHE": f"{place}/xet"}
        limits = ["--latency", *LATENCY, "--megabytes-per-second", BANDWIDTH]
        script = ROOT / "tests" / "support" / "hub" / "loopback_hub.py"
        server = subprocess.Popen(
            [sys.executable, str(script), *limits],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert server.stdout is not None
        environment |= dict(server.stdout.readline().strip().split("=", 1) for _ in range(3))
        try:
            for pair in range(options.pairs):
                runs: dict[str, Run] = {}
                for kind in ("without", "with") if pair % 2 else ("with", "without"):
                    hub = [f"hub.repo_id=me/run{pair}", "hub.min_interval_seconds=0"]
                    folder = Path(place) / f"{kind}-{pair}"
                    more = [f"train.seed={pair}"]  # the storage has the chunks of another pair
                    more += hub if kind == "with" else []
                    command = [*train, *words(folder, options.steps, *more)]
                    runs[kind] = timed(command, options.steps, environment)
                uploads, sent = uploads_of(runs["with"].printed, Path(place) / f"with-{pair}")
                ratios.append(runs["with"].seconds / runs["without"].seconds)
                stalls.append(stall_and_durable(runs["with"].printed)[0])
                cpu.append((runs["with"].cpu_seconds - runs["without"].cpu_seconds) / uploads)
                memory.append(runs["with"].peak_bytes - runs["without"].peak_bytes)
                print(
                    f"pair {pair + 1}: {runs['without'].seconds:.1f} s without, "
                    f"{runs['with'].seconds:.1f} s with a Hub: {ratios[-1]:.3f}; {uploads} uploads "
                    f"of {sent / uploads / 1e6:.0f} MB, {cpu[-1]:.1f} CPU seconds each; "
                    f"{memory[-1] / 1e6:.0f} MB more at the peak",
                    flush=True,
                )
        finally:
            server.terminate()
            server.wait()
    print(
        f"median {statistics.median(ratios):.3f}, spread {min(ratios):.3f} to {max(ratios):.3f}; "
        f"a stall of {statistics.median(stalls):.2f} s a snapshot; an upload takes "
        f"{statistics.median(cpu):.1f} CPU seconds and at most {max(memory) / 1e6:.0f} MB"
    )
    found = {"stall_seconds": stalls, "cpu_seconds": cpu, "bytes": memory}
    save("snapshots-hub", {"ratios": ratios, **found})


def uploads_of(printed: str, run_dir: Path) -> tuple[int, float]:
    """About how many snapshots a run has uploaded, and the bytes that it sent, as it says."""
    sent = 1e6 * float(re.findall(r"uploads sent ([\d.]+) MB", printed)[0])
    newest = max((run_dir / "snapshots").glob("step-*"))
    size = sum(path.stat().st_size for path in newest.glob("*.safetensors"))
    return max(1, round(sent / size)), sent


if __name__ == "__main__":
    main()
