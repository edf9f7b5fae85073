"""Moments at which tests kill a run, and the kill."""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path

import runs


def wait_for(moment, process: subprocess.Popen) -> bool:
    """Wait until `moment()` holds, closely enough to hit the inside of a snapshot's writing."""
    end = time.monotonic() + runs.DEADLINE_SECONDS
    while time.monotonic() < end:
        if moment():
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.0005)
    raise AssertionError("the run did nothing before the deadline")


def kill_at(words: list[str], moment, said: Path, forked: bool = True, **changes: str) -> bool:
    """Start a run, kill it and all its processes at the moment; False if it ended before."""
    with runs.started(words, into=said, forked=forked, **changes) as process:
        return wait_for(moment, process)


def inside_a_step(run_dir: Path, chosen: random.Random):
    """Somewhere in the first dozens of steps after the start."""
    metrics = run_dir / "metrics.jsonl"
    before = metrics.stat().st_size if metrics.exists() else 0
    more = before + chosen.randrange(200, 8000)
    return lambda: metrics.exists() and metrics.stat().st_size > more


def inside_the_writing(run_dir: Path, chosen: random.Random):
    """A snapshot's temporary folder is there, with a random number of its files."""
    root = run_dir / "snapshots"
    count = chosen.randrange(0, 8)

    def moment() -> bool:
        try:
            building = [entry for entry in os.scandir(root) if entry.name.startswith(".tmp-step")]
            return any(len(os.listdir(folder)) >= count for folder in building)
        except FileNotFoundError:
            return False

    return moment


def after_a_rename(run_dir: Path, chosen: random.Random):
    """A snapshot has just appeared."""
    root = run_dir / "snapshots"
    before = set(os.listdir(root)) if root.exists() else set()
    return lambda: (
        root.exists() and any(name.startswith("step-") for name in set(os.listdir(root)) - before)
    )
