"""`python -m snapshot status`: how far a run is, by its directory or by its store."""

from __future__ import annotations

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
from training.reporting.metrics import newest_step
from training.run.run_dir import EXIT_CODE, holds_run

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
    written, step, code = "", None, exit_code_in(run_dir / EXIT_CODE)
    with suppress(OSError, ConfigError):  # of a file that is not there, or no metrics file
        written = utc((run_dir / METRICS).stat().st_mtime)
        step = newest_step(run_dir / METRICS)
    state = "training, or killed: there is no exit code"
    if code is not None:
        state = f"{MEANINGS.get(code, 'ended')} (exit code {code})"
    return [
        ("run", f"{run_dir}"),
        ("step", "no step yet" if step is None else f"{step:,} is the newest"),
        ("recorded", _when(written)),
        ("state", state),
    ]


def _when(text: str) -> str:
    """A time of `store.latest.utc`, by the clock of its machine, and how long ago that was."""
    try:
        written = datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        return "unknown"
    ago = max(0.0, time.time() - written.timestamp())
    return f"{written:%Y-%m-%d %H:%M:%S} UTC, {duration(ago)} ago"
