"""`python -m snapshot status`: how far a run is, by its directory or by its store."""

from __future__ import annotations

import fcntl
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from common.printable import printable
from config.schema import ConfigError
from snapshot.errors import SnapshotError
from snapshot.source import find
from store.fetch import Contents
from store.latest import METRICS, utc
from store.store import BRANCH
from training.exits import MEANINGS, exit_code_in
from training.reporting.console import duration
from training.reporting.metrics import newest_step, read_events
from training.run.run_dir import EXIT_CODE, LOCK, holds_run

Facts = list[tuple[str, str]]
"""Lines of the command: what each is about, and the text."""


def print_status(source: str) -> int:
    """Print the status of a run. Raises SnapshotError and StoreError if there is none."""
    found = find(source)
    facts = of_folder(Path(source)) if found.contents is None else of_store(found.contents)
    for name, text in facts:
        print(printable(f"{name:<10}{text}"))
    return 0


def of_store(contents: Contents) -> Facts:
    """The status of the run in a store."""
    store = contents.store
    if contents.revision != BRANCH:
        raise SnapshotError(f"status is that of now: leave out @{contents.revision}.")
    if refusal := contents.refusal():
        raise SnapshotError(refusal)
    if (latest := contents.latest) is None:
        raise SnapshotError(f"{store.name} holds no run. Check the name.")
    return [
        ("run", f"{latest.run_id[:8]} in {store.name}"),
        ("attempt", f"{latest.attempt_id[:8]}, generation {latest.generation}"),
        ("machine", latest.machine or "unknown"),
        ("step", f"{latest.step:,} is the newest there"),
        ("uploaded", _when(latest.time)),
    ]


def of_folder(run_dir: Path) -> Facts:
    """The status of the run in a directory of this machine, by its files alone."""
    if not holds_run(run_dir):
        raise SnapshotError(f"{run_dir} holds no run. Name a run's folder or its store.")
    newest = {event["event"]: event for event in read_events(run_dir / METRICS)}
    written, step = "", None
    with suppress(OSError, ConfigError):  # of a file that is not there, or no metrics file
        written = utc((run_dir / METRICS).stat().st_mtime)
        step = newest_step(run_dir / METRICS)
    return [
        ("run", f"{run_dir}"),
        ("attempt", newest["start"]["attempt"] if "start" in newest else "unknown"),
        ("machine", newest["machine"]["text"] if "machine" in newest else "unknown"),
        ("step", "no step yet" if step is None else f"{step:,} is the newest"),
        ("recorded", _when(written)),
        ("state", _state_of(run_dir)),
    ]


def _state_of(run_dir: Path) -> str:
    """Whether a process has the directory's lock, else how the last one ended."""
    left = "and the last one left no exit code"
    try:
        if _is_locked(run_dir / LOCK):
            return "training"
        unknown = f"unknown: no process of this machine trains here, {left}"
    except OSError as error:
        unknown = f"unknown: {run_dir / LOCK} cannot be read ({error.strerror}), {left}"
    code = exit_code_in(run_dir / EXIT_CODE)
    return unknown if code is None else f"{MEANINGS.get(code, 'ended')} (exit code {code})"


def _is_locked(path: Path) -> bool:
    """Whether a process of this machine has a lock. Raises OSError where that cannot be told."""
    try:
        # Not by filelock, which opens the file for writing: the run may be another user's.
        with open(path, "rb") as opened:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError) as error:
        return isinstance(error, BlockingIOError)
    return False


def _when(text: str) -> str:
    """A time of `store.latest.utc`, by the clock of its machine, and how long ago that was."""
    try:
        written = datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        return "unknown"
    ago = max(0.0, time.time() - written.timestamp())
    return f"{written:%Y-%m-%d %H:%M:%S} UTC, {duration(ago)} ago"
