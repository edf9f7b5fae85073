"""Seconds from a command to its first step, compared with the imports of torch and accelerate.

    python benchmarks/startup.py

The commands differ in what starts the process: `accelerate launch` imports transformers before
torch, accelerate-launch only torch, `python train.py` is the process itself. The other starts are
accelerate-launch's: with a text to prepare, and resumed. "Resumed at step 999,999" resumes from a
snapshot of the same run at that step; it must take as long as a resume at step 1. "After a kill" is
from the kill -9 of one of two processes to the next new step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from harness import (
    ROOT,
    as_words,
    kill_with_children,
    launch,
    machine,
    median,
    print_table,
    save,
    spread,
)

LATE = 999_999
"""Not 1,000,000: an evaluation would be due there, and would take place at the resume."""
IMPORTS = "import torch, accelerate"
COMMANDS = {
    "accelerate launch": [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"],
    "accelerate-launch": [sys.executable, "-m", "accelerate.commands.launch"],
    "python train.py": [sys.executable],
}
RESUMED = {"resumed at step 1": "early", f"resumed at step {LATE:,}": "late"}
CASES = (IMPORTS, *COMMANDS, "text not prepared", *RESUMED)
KILLED = "after a kill, two processes"
AS_CPU_YAML = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "bf16"}
ENVIRONMENT = os.environ | AS_CPU_YAML
ENVIRONMENT.pop("PYTHONDONTWRITEBYTECODE", None)
"""As a user's second start has it: pip has compiled torch, and the first start the project."""
STEP = re.compile(r"step (\d+)/")


def run_in(folder: Path, run: str, *words: str) -> list[str]:
    """The script and its arguments."""
    quiet = ("train.log_every=1", "train.sample_every=0", "train.eval_batches=1")
    return [str(ROOT / "train.py"), f"run.dir={folder / run}", *quiet, *words]


def by(starter: str, script: list[str]) -> list[str]:
    """The command that starts a script."""
    config = ["--config_file", str(ROOT / "accelerate_configs/cpu.yaml")]
    return [*COMMANDS[starter], *(config if "launch" in starter else []), *script]


def seconds_to_first_step(command: list[str]) -> float:
    """Seconds until the line of the first step is printed; the run is then terminated."""
    started_at = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stdout is not None
        found = next((line for line in process.stdout if STEP.match(line)), None)
        seconds = time.perf_counter() - started_at
        process.terminate()
        process.stdout.read()
    if found is None:
        sys.exit(f"{' '.join(command)} has taken no step")
    return seconds


def make_snapshots(folder: Path) -> None:
    """A run of one step, and a copy whose state.json has step 999,999."""
    command = run_in(folder, "early", f"data.cache_dir={folder / 'data'}", "train.max_steps=1")
    subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, check=True)
    sys.path.insert(0, str(ROOT))
    from snapshot.disk.folder import MANIFEST, atomic_snapshot, folder_name

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
    if case == IMPORTS:
        started_at = time.perf_counter()
        subprocess.run([sys.executable, "-c", IMPORTS], check=True, env=ENVIRONMENT)
        return time.perf_counter() - started_at
    run = f"{CASES.index(case)}-{turn}"
    if case in RESUMED:
        shutil.copytree(folder / RESUMED[case], folder / run)
    elif case not in COMMANDS:
        more[0] = f"data.cache_dir={folder / run / 'data'}"
    starter = case if case in COMMANDS else "accelerate-launch"
    return seconds_to_first_step(by(starter, run_in(folder, run, *more)))


def seconds_after_kills(folder: Path, kills: int) -> list[float]:
    """Seconds from each kill -9 of a worker to the next step that had not been taken before."""
    more = [f"data.cache_dir={folder / 'data'}", f"train.max_steps={LATE}", "snapshot.every=20"]
    script, *words = run_in(folder, "killed", *more)
    options = ("--num_processes=2", f"--max_restarts={kills}")
    command = launch("ddp_cpu.yaml", script, *words, options=options)
    seconds, newest, killed_at, next_kill = [], 0, 0.0, 30
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            step = int(found[1]) if (found := STEP.match(line)) else 0
            if step > newest and killed_at:
                seconds.append(time.perf_counter() - killed_at)
                killed_at, next_kill = 0.0, step + 30
            newest = max(newest, step)
            if len(seconds) == kills:
                break
            if newest >= next_kill and not killed_at:
                psutil.Process(process.pid).children()[-1].kill()
                killed_at = time.perf_counter()
        kill_with_children(process)
    return seconds


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
        seconds[KILLED] = seconds_after_kills(folder, options.turns)
    base = median(seconds[IMPORTS])
    print_table(
        ("start", "seconds to the first step", "of the imports"),
        [
            (case, spread(found, 2), f"{median(found) / base:.2f}")
            for case, found in seconds.items()
        ],
    )
    save("startup", seconds)


if __name__ == "__main__":
    main()
