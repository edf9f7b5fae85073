"""What the choice of attention on a CPU is worth: steps of train.py with each way, in turns.

    OMP_NUM_THREADS=1 python benchmarks/attention.py

Both ways run as real training, and so does what `run.attention=auto` chooses.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import SHAPES, as_words, machine, overrides, print_table, save, spread
from turns import Contestant, ours, take_turns

WAYS = ("products", "kernel")
STEPS = {"small": 60, "large": 3}


def compare(shape: str, precision: str, dropout: float, turns: int, folder: Path) -> dict[str, Any]:
    """Seconds of a step by way."""
    words = overrides(SHAPES[shape], dropout)
    started: list[Contestant] = []
    try:
        for way in (*WAYS, "auto"):
            more = [*words, f"run.attention={way}"]
            options = (f"--mixed_precision={precision}", "--dynamo_backend=no")
            started.append(ours(way, "cpu.yaml", more, folder, options))
        take_turns(started, STEPS[shape], turns, 5)
    finally:
        for one in started:
            one.end()
    return {
        "shape": shape,
        "precision": precision,
        "dropout": dropout,
        "seconds": {one.name: one.seconds for one in started},
    }


def main() -> None:
    """One table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["small", "large"], choices=sorted(STEPS))
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    print(as_words(machine()))
    rows, figures = [], []
    for shape in options.shapes:
        for precision in ("no", "bf16"):
            for dropout in (0.0, 0.2):
                with tempfile.TemporaryDirectory() as folder:
                    found = compare(shape, precision, dropout, options.turns, Path(folder))
                figures.append(found)
                products, kernel, auto = found["seconds"].values()
                ratios = [b / a for a, b in zip(products, kernel, strict=True)]
                best = [min(pair) / a for *pair, a in zip(products, kernel, auto, strict=True)]
                cells = [f"{1e3 * sorted(one)[len(one) // 2]:.1f}" for one in (products, kernel)]
                rows.append([shape, precision, f"{dropout:g}", *cells, spread(ratios)])
                rows[-1].append(spread(best))
    headers = ("shape", "precision", "dropout", "products, ms", "kernel, ms", "kernel / products")
    print_table((*headers, "better / auto"), rows)
    save("attention", figures)


if __name__ == "__main__":
    sys.exit(main())
