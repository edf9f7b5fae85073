"""What snapshots and their upload cost a run: real runs of train.py, interleaved, one thread each.

python benchmarks/snapshots.py [--pairs 4] [--steps 60]

A run with a loopback Hub that takes its time, beside the same run without; both write a snapshot
every 20 steps. The time is that of the loop, snapshots included, by the lines it prints.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EVERY = 20
LATENCY = ("0.05", "2.0")


def words(folder: Path, steps: int, *more: str) -> list[str]:
    """6 layers, 384 wide, context 256, batch 8: snapshots of about 130 MB."""
    return [
        sys.executable,
        str(ROOT / "train.py"),
        "model.n_layer=6",
        "model.n_head=6",
        "model.n_embd=384",
        "data.block_size=256",
        "train.global_batch_size=8",
        f"train.max_steps={steps}",
        f"train.log_every={EVERY}",
        f"train.eval_every={steps}",
        "train.eval_batches=1",
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


def main() -> None:
    """Print a line for each pair, and the medians."""
    parser = argparse.ArgumentParser(description="What uploads cost a run.")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    ratios, waits = [], []
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
                    command = words(folder, options.steps, *(hub if kind == "with" else []))
                    seconds[kind], printed = timed(command, options.steps, environment | there)
                    waits.append(float(re.findall(r"waits ([\d.]+) s", printed)[0]))
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


if __name__ == "__main__":
    main()
