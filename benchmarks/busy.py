"""Tokens per second of the README's first command where other programs use the same cores.

    python benchmarks/busy.py

The contestants take turns as in throughput.py: as it is shipped, with one thread, and with a thread
for each core that spins as long as GNU's OpenMP library does by default. In each turn the machine
is quiet, or one core is kept busy, or the trainers are limited to 1.2 cores by a cgroup (Linux,
cgroup version 1 or 2, as root; left out where there is none).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from common import as_words, machine, median, print_table, save, spread
from turns import Contestant, ours

TOKENS = 12 * 64
LIMIT, PERIOD = 120_000, 100_000
"""Microseconds of CPU time in a period."""
BURN = [sys.executable, "-c", "while True: pass"]
HAND = ("one thread", "a thread for each core")


@contextmanager
def one_core_busy(_: list[Contestant]) -> Iterator[None]:
    """Another program that computes all the time."""
    with subprocess.Popen(BURN) as burner:
        yield
        burner.kill()


@contextmanager
def limited(contestants: list[Contestant]) -> Iterator[None]:
    """All processes of the contestants in a cgroup with 1.2 cores, of which one computes."""
    first, second = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    home = first if first.is_dir() else second
    group = home / "accelerate-gpt"
    group.mkdir(exist_ok=True)
    if home == first:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD))
        (group / "cpu.cfs_quota_us").write_text(str(LIMIT))
    else:
        (group / "cpu.max").write_text(f"{LIMIT} {PERIOD}")
    processes = [psutil.Process(one.process.pid) for one in contestants]
    pids = [one.pid for parent in processes for one in (parent, *parent.children(recursive=True))]
    for place in (group, home):
        for pid in pids:
            (place / "cgroup.procs").write_text(str(pid))
        if place == group:
            yield
    group.rmdir()


@contextmanager
def quiet(_: list[Contestant]) -> Iterator[None]:
    yield


SCENES = {"quiet": quiet, "one core busy": one_core_busy, "1.2 cores": limited}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40, help="a turn")
    parser.add_argument("--scenes", nargs="+", default=list(SCENES), choices=list(SCENES))
    parser.add_argument("--spins", nargs="*", default=[], help="more: other limits of spinning")
    options = parser.parse_args()
    print(as_words(machine()))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        started = [
            ours("as shipped", "cpu.yaml", [], folder),
            ours(HAND[0], "cpu.yaml", [], folder, OMP_NUM_THREADS="1"),
            ours(HAND[1], "cpu.yaml", [], folder, GOMP_SPINCOUNT="300000"),
        ]
        for spins in options.spins:
            started.append(ours(f"{spins} spins", "cpu.yaml", [], folder, GOMP_SPINCOUNT=spins))
        figures = {scene: {one.name: [] for one in started} for scene in options.scenes}
        for one in started:
            one.run_steps(20, warm_up=True)
        for turn in range(options.turns):
            for scene in options.scenes:
                with SCENES[scene](started):
                    for one in started if turn % 2 else started[::-1]:
                        seconds = one.run_steps(options.steps)
                        figures[scene][one.name].append(TOKENS / seconds)
        for one in started:
            one.end()
    for scene, found in figures.items():
        best = max(median(found[name]) for name in HAND)
        rows = [
            (name, spread(speeds, 0), f"{median(speeds) / best:.2f}")
            for name, speeds in found.items()
        ]
        print(f"\n{scene}, {options.turns} turns of {options.steps} steps")
        print_table(("", "tokens/s", "of the better one by hand"), rows)
    save("busy", figures)


if __name__ == "__main__":
    main()
