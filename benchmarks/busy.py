"""Tokens per second of the README's first command where other programs use the same cores.

    python benchmarks/busy.py

Whole runs in turns: as shipped, with one thread by hand, and with a thread for each core by hand.
The machine is quiet, or one core is kept busy, or the run is limited to 1.2 cores by a cgroup
(Linux, as root).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import as_words, launch, machine, median, print_table, save, spread

TOKENS = 12 * 64
LIMIT, PERIOD = 120_000, 100_000
"""Microseconds of CPU time in a period."""
BURN = [sys.executable, "-c", "while True: pass"]
ONE = {"OMP_NUM_THREADS": "1"}
FIXED = ["run.adapt_threads=false"]
CONTESTANTS = {
    "as shipped": ([], {}),
    "one thread": (FIXED, ONE),
    "a thread for each core": (FIXED, {}),
}
QUIET, BUSY, LIMITED = "quiet", "one core busy", "1.2 cores"


@contextmanager
def scene(name: str) -> Iterator[str]:
    """A command that begins a shell, within a scene."""
    if name == BUSY:
        with subprocess.Popen(BURN) as burner:
            yield ":"
            burner.kill()
    elif name == LIMITED:
        with limited() as group:
            yield f"echo $$ > {group}/cgroup.procs"
    else:
        yield ":"


@contextmanager
def limited() -> Iterator[Path]:
    """A cgroup with 1.2 cores, of version 1 or 2."""
    first = Path("/sys/fs/cgroup/cpu")
    group = (first if first.is_dir() else first.parent) / "accelerate-gpt"
    group.mkdir(exist_ok=True)
    if first.is_dir():
        (group / "cpu.cfs_period_us").write_text(str(PERIOD))
        (group / "cpu.cfs_quota_us").write_text(str(LIMIT))
    else:
        (group / "cpu.max").write_text(f"{LIMIT} {PERIOD}")
    try:
        yield group
    finally:
        with contextlib.suppress(OSError):  # a process is just ending
            group.rmdir()


def tokens_per_second(folder: Path, steps: int, first: str, contestant: str) -> float:
    """The speed of the steps of a run."""
    words, environment = CONTESTANTS[contestant]
    with tempfile.TemporaryDirectory(dir=folder) as run_dir:
        command = launch(
            "cpu.yaml",
            "train.py",
            f"run.dir={run_dir}/run",
            f"data.cache_dir={folder / 'data'}",
            f"train.max_steps={steps}",
            *("train.eval_batches=1", "train.eval_every=1000000", "train.sample_every=0"),
            *words,
        )
        subprocess.run(
            ["sh", "-c", f'{first}; exec "$@"', "sh", *command],
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        lines = (Path(run_dir) / "run" / "metrics.jsonl").read_text().splitlines()
        speeds = [one["tokens_per_second"] for one in map(json.loads, lines) if "grad_norm" in one]
    return TOKENS * len(speeds) / sum(TOKENS / speed for speed in speeds)


def main() -> None:
    """A table for each scene."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300, help="of a run")
    parser.add_argument("--scenes", nargs="+", default=[QUIET, BUSY, LIMITED])
    options = parser.parse_args()
    print(as_words(machine()))
    figures: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as place:
        for name in options.scenes:
            found = figures[name] = {contestant: [] for contestant in CONTESTANTS}
            for turn in range(options.turns):
                for contestant in list(found)[:: -1 if turn % 2 else 1]:
                    with scene(name) as first:
                        speed = tokens_per_second(Path(place), options.steps, first, contestant)
                    found[contestant].append(speed)
                    print(f"{name}: {contestant}: {speed:,.0f}", file=sys.stderr, flush=True)
            best = max(median(speeds) for speeds in list(found.values())[1:])
            print(f"\n{name}, {options.turns} runs of {options.steps} steps")
            rows = [
                (contestant, spread(speeds, 0), f"{median(speeds) / best:.2f}")
                for contestant, speeds in found.items()
            ]
            print_table(("", "tokens/s", "of the better one by hand"), rows)
    save("busy", figures)


if __name__ == "__main__":
    main()
