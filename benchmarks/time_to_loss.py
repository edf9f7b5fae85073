"""Time to a loss: the tuned and the well-known character run, as complete commands, in turns.

    python benchmarks/time_to_loss.py --source <Tiny Shakespeare>

Both are timed as a user starts them, with all cores of the CPU: from the launch to the end of the
process, with evaluations, samples and snapshots. The loss is that of the complete held-out text.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import as_words, launch, machine, median, print_table, save, spread

EXPERIMENTS = ("shakespeare_char_cpu", "shakespeare_char_cpu_reference")


def complete_run(experiment: str, source: str, folder: Path, turn: int) -> tuple[float, float]:
    """Seconds of the complete command, and the held-out loss in nats."""
    words = [f"experiment={experiment}", f"data.source={source}", f"train.seed={turn + 1}"]
    words += [f"run.dir={folder / f'{experiment}-{turn}'}", f"data.cache_dir={folder / 'data'}"]
    command = launch("cpu.yaml", "train.py", *words)
    started_at = time.perf_counter()
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    seconds = time.perf_counter() - started_at
    return seconds, float(re.findall(r"held-out loss ([\d.]+)", output)[-1])


def main() -> None:
    """Print a row for each experiment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", required=True, help="a path of Tiny Shakespeare")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    print(as_words(machine()))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in EXPERIMENTS}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.turns):
            for name in EXPERIMENTS if turn % 2 else EXPERIMENTS[::-1]:
                found[name].append(complete_run(name, options.source, Path(folder), turn))
                print(f"{name}: {found[name][-1]}", file=sys.stderr, flush=True)
    seconds = {name: [one[0] for one in results] for name, results in found.items()}
    tuned, reference = (seconds[name] for name in EXPERIMENTS)
    ratios = [mine / theirs for mine, theirs in zip(tuned, reference, strict=True)]
    print_table(
        ("experiment", "whole command, s", "held-out loss, nats", "of the reference's time"),
        [
            (name, spread(seconds[name], 1), spread([one[1] for one in found[name]], 4), share)
            for name, share in zip(EXPERIMENTS, (f"{median(ratios):.2f}", "1"), strict=True)
        ],
    )
    save("time_to_loss", {"found": found, "ratios": ratios})


if __name__ == "__main__":
    main()
