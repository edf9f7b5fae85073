"""Seconds from `accelerate launch` to the first step: with a text to prepare, prepared, resumed.

    python benchmarks/startup.py

"Resumed at step 1,000,000" resumes from a snapshot of the same run at that step; it must take as
long as a resume at step 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, as_words, launch, machine, median, print_table, save, spread

LATE = 1_000_000
CASES = ("import torch", "fresh", "prepared", "resumed at step 1", f"resumed at step {LATE:,}")


def run_in(folder: Path, run: str, *words: str) -> list[str]:
    quiet = ("train.log_every=1", "train.sample_every=0", "train.eval_batches=1")
    return launch("cpu.yaml", "train.py", f"run.dir={folder / run}", *quiet, *words)


def seconds_to_first_step(command: list[str]) -> float:
    """Seconds until the line of the first step is printed; the run is then terminated."""
    started_at = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = next((line for line in process.stdout if line.startswith("step ")), None)
        while found is not None and "/" not in found.split(",")[0]:  # "step      768 tokens"
            found = next((line for line in process.stdout if line.startswith("step ")), None)
        seconds = time.perf_counter() - started_at
        process.terminate()
        process.stdout.read()
    if found is None:
        sys.exit(f"{' '.join(command)} has taken no step")
    return seconds


def make_snapshots(folder: Path) -> None:
    """A run of one step, and a copy whose state.json has step 1,000,000."""
    command = run_in(folder, "early", f"data.cache_dir={folder / 'data'}", "train.max_steps=1")
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    sys.path.insert(0, str(ROOT))
    from snapshot.disk.files import MANIFEST, atomic_snapshot, folder_name

    early, late = folder / "early/snapshots" / folder_name(1), folder / "late/snapshots"
    with atomic_snapshot(late, folder_name(LATE)) as building:
        for file in early.iterdir():
            if file.name == "state.json":
                state = json.loads(file.read_text())
                # The optimizer has counted one update, so the others must be recorded as skipped.
                state |= {"step": LATE, "skipped_steps": LATE - 1}
                (building / file.name).write_text(json.dumps(state))
            elif file.name != MANIFEST:
                shutil.copy(file, building)


def time_start(case: str, folder: Path, turn: int) -> float:
    more = [f"data.cache_dir={folder / 'data'}", f"train.max_steps={2 * LATE}"]
    if case == "import torch":
        started_at = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        return time.perf_counter() - started_at
    if case == "fresh":
        more[0] = f"data.cache_dir={folder / f'data-{turn}'}"
    if case.startswith("resumed"):
        kind = "late" if case == CASES[-1] else "early"
        shutil.copytree(folder / kind, folder / f"{kind}-{turn}")
        return seconds_to_first_step(run_in(folder, f"{kind}-{turn}", *more))
    return seconds_to_first_step(run_in(folder, f"{case}-{turn}", *more))


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    print(as_words(machine()))
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_snapshots(folder)
        for turn in range(options.turns):
            for case in CASES if turn % 2 else CASES[::-1]:
                seconds[case].append(time_start(case, folder, turn))
    base = median(seconds["prepared"])
    print_table(
        ("start", "seconds to the first step", "of a prepared one"),
        [
            (case, spread(found, 2), f"{median(found) / base:.2f}")
            for case, found in seconds.items()
        ],
    )
    save("startup", seconds)


if __name__ == "__main__":
    main()
