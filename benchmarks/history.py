"""What grows with the steps that a run has taken; and verification compared with hashing.

    OMP_NUM_THREADS=1 python benchmarks/history.py [--turns 9] [--shape small]

One table over 100 to 1,000,000 steps: the first batch of a start there, a batch after it, an
update, a snapshot, a resume, and the metrics that an upload carries. All in one process, in turns.
Reported is the minimum CPU time of all turns, because other programs may use the machine. An upload
to a loopback Hub and the resident memory are of a process for each length (history_upload.py).
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from harness import SHAPES, as_words, machine, print_table, save
from history_run import BATCHES, Run
from history_upload import measure

LENGTHS = (100, 1_000, 10_000, 100_000, 1_000_000)
KINDS = {
    "first batch": 1,
    "batch": BATCHES,
    "update": 1,
    "snapshot": 1,
    "resume": 1,
    "metrics of an upload": 1,
}
"""What is timed, and how often in one turn."""


def histories(turns: int, shape: str) -> None:
    """Print the cost of everything after 100 to 1,000,000 steps."""
    seconds: dict[str, dict[int, list[float]]] = {
        kind: {steps: [] for steps in LENGTHS} for kind in KINDS
    }
    megabytes: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as place:
        runs = [Run(Path(place), steps, shape) for steps in LENGTHS]
        for run in runs:  # warm-up: files of that size exist, and all modules are imported
            run.resume()
            run.snapshot()
            run.metrics_of_an_upload()
        for _ in range(turns):
            for run in runs:
                for kind, times in KINDS.items():
                    work = getattr(run, kind.replace(" ", "_"))
                    seconds[kind][run.steps].append(timed(work) / times)
        for run in runs:
            tracemalloc.start()
            run.resume()
            run.snapshot()
            megabytes[run.steps] = tracemalloc.get_traced_memory()[1] / 1e6
            tracemalloc.stop()
        carried = {run.steps: run.carried for run in runs}
    alone = {steps: measure(steps, shape) for steps in LENGTHS}
    rows = []
    for steps in LENGTHS:
        figures = [1e3 * min(seconds[kind][steps]) for kind in KINDS]
        first = [1e3 * min(seconds[kind][LENGTHS[0]]) for kind in KINDS]
        cells = [f"{a:.3g} ({a / b:.2f})" for a, b in zip(figures, first, strict=True)]
        rows.append(
            (
                f"{steps:,}",
                *cells,
                f"{1e3 * alone[steps]['upload']:.0f}",
                f"{carried[steps] / 1e6:.2f}",
                f"{megabytes[steps]:.1f}",
                f"{alone[steps]['resident']:.0f}",
            )
        )
    heads = [f"{kind}, ms" for kind in KINDS]
    more = ("upload, ms", "MB of metrics an upload", "Python's peak, MB", "resident, MB")
    print_table(("steps", *heads, *more), rows)
    figures = {"seconds": seconds, "megabytes": megabytes, "carried": carried, "alone": alone}
    save("history", figures)


def verifications(turns: int, shape: str) -> None:
    """Print the cost of verifying a snapshot, compared with hashing its files."""
    from snapshot.disk.checking import check_snapshot
    from snapshot.disk.folder import verify

    with tempfile.TemporaryDirectory() as place:
        run = Run(Path(place), 100, shape)
        run.resume()
        run.snapshot()
        folder = run.report.last_snapshot
        assert folder is not None
        times: dict[str, list[float]] = {"sha256": [], "verify": [], "check": []}
        for _ in range(turns):
            times["sha256"].append(timed(lambda: hash_all(folder)))
            times["verify"].append(timed(lambda: verify(folder)))
            times["check"].append(timed(lambda: check_snapshot(folder)))
        size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    figures = {kind: min(seconds) for kind, seconds in times.items()}
    cells = [f"{figure:.3f} ({figure / figures['sha256']:.2f})" for figure in figures.values()]
    names = ("MB", "sha256 alone, s", "as the manifest says, s", "and the contents, s")
    print_table(names, [(f"{size:.0f}", *cells)])
    save("snapshots-verify", times)


def hash_all(folder: Path) -> None:
    """Read and hash all files."""
    for file in folder.iterdir():
        with open(file, "rb") as opened:
            hashlib.file_digest(opened, "sha256")


def timed(work: Callable[[], object]) -> float:
    """CPU seconds of all threads."""
    started_at = time.process_time()
    work()
    return time.process_time() - started_at


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--shape", default="small", choices=SHAPES)
    options = parser.parse_args()
    print(as_words(machine()))
    histories(options.turns, options.shape)


if __name__ == "__main__":
    main()
