"""Runs that are told to stop, and what they leave."""

from __future__ import annotations

from pathlib import Path

import runs
from snapshot.disk.folder import snapshot_folders

ENDLESS = ["train.max_steps=100000", "snapshot.every=100000", "train.eval_every=100000"]


def wait_for_steps(process, run_dir: Path, steps: int = 5) -> None:
    """Until the run has taken so many more steps."""
    goal = runs.newest_step(run_dir) + steps
    runs.wait_until(lambda: runs.newest_step(run_dir) >= goal, process)


def exit_code(run_dir: Path) -> int:
    """What the attempt has left for whoever started it."""
    return int((run_dir / "exit_code").read_text())


def only_snapshot(run_dir: Path) -> Path:
    """The one snapshot of a run that was stopped before its first regular one."""
    (folder,) = snapshot_folders(run_dir / "snapshots")
    assert runs.newest_step(run_dir) == int(folder.name.removeprefix("step-"))
    return folder
