"""A run's records: metrics.jsonl on this disk, what other machines recorded, what is uploaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common.retries import with_retries
from config.schema import Config, ConfigError
from config.stored import as_plain, as_yaml
from snapshot.config_values import changed_values
from snapshot.disk.folder import snapshots_in, write_whole
from snapshot.disk.state import RunState
from snapshot.errors import SnapshotError
from snapshot.start import Start
from store.errors import StoreError
from store.records import METRICS, fetch_metrics
from training.reporting.console import Console
from training.reporting.metrics import (
    Events,
    MetricsFile,
    add_fetched,
    metrics_up_to,
    read_metrics,
)
from training.run.run_dir import CONFIG_FILE, not_writable

PROOF = "proof.json"


def begin_records(
    console: Console, config: Config, start: Start, state: RunState, code_before: int | None
) -> MetricsFile:
    """Write config.yaml, and continue metrics.jsonl, also with what other machines recorded.

    Only the main process calls this. `code_before` is the exit code of the attempt before. Raises
    ConfigError where the disk refuses it, or where it is no metrics file.
    """
    run_dir = Path(config.run.dir)
    # A run that begins from another run's snapshot has no lines of its own yet.
    step = state.step if start.is_in(run_dir) else 0
    problem = fetch_missing(config, start, state)
    try:
        write_whole(run_dir / CONFIG_FILE, as_yaml(config))  # first: it makes the folder a run's
        metrics = MetricsFile(run_dir / METRICS, step)
    except OSError as error:
        raise not_writable(run_dir, error) from error
    console.events = Events(metrics, state.attempt_id)
    if problem:
        console.warn(problem)
    console.note("start", state.step, _origin(config, start, code_before))
    console.note("machine", state.step, state.computed_on or "")
    if start.state is not None:
        for change in changed_values(start.state.config, as_plain(config)):
            console.note("changed", state.step, change)
    return metrics


def _origin(config: Config, start: Start, code_before: int | None) -> str:
    """Where the attempt starts, and how the one before it ended on this disk."""
    if start.folder is None:
        return "from scratch"
    if not start.is_in(Path(config.run.dir)):
        return "from the snapshot of another run"
    if start.fetched:
        return "resumed from the Hub"
    ended = "was killed" if code_before is None else f"ended with exit code {code_before}"
    return f"resumed from the disk; the attempt before {ended}"


def fetch_missing(config: Config, start: Start, state: RunState) -> str:
    """Fetch the metrics of steps that another machine took, where this disk lacks them.

    Returns why that failed, or an empty text.
    """
    run_dir, contents = Path(config.run.dir), start.contents
    latest = None if contents is None else contents.latest
    if contents is None or latest is None or latest.run_id != state.run_id:
        return ""
    try:
        if read_metrics(run_dir / METRICS, state.step - 1):
            return ""
        with TemporaryDirectory(prefix=".tmp-", dir=snapshots_in(run_dir)) as folder:
            fetched = with_retries(lambda: fetch_metrics(contents, Path(folder)))
            if fetched is not None:
                add_fetched(run_dir / METRICS, fetched, state.step)
    except (SnapshotError, StoreError, ConfigError, OSError) as error:
        return (
            f"the metrics of earlier steps could not be fetched from {contents.name}: "
            f"{str(error).rstrip('.')}. The curves of this run begin at step {state.step + 1}."
        )
    return ""


def folder_of_proof(run_dir: str | Path) -> Path:
    """Where prove.py records what it has checked for a run: next to its directory."""
    return Path(f"{run_dir}-proof")


def read_proof(run_dir: str | Path) -> dict[str, Any] | None:
    """What prove.py recorded for a run, with its `summary`; None without a record of it."""
    with suppress(OSError, ValueError):
        proof = json.loads((folder_of_proof(run_dir) / PROOF).read_text(encoding="utf-8"))
        if isinstance(proof, dict) and isinstance(proof.get("summary"), str):
            return proof
    return None


def records_for_upload(config: Config) -> Callable[[int], dict[str, bytes]]:
    """What an upload adds of the records: `store.attempt.UploadTarget.records`."""
    run_dir = Path(config.run.dir)

    def records(step: int) -> dict[str, bytes]:
        files = {METRICS: metrics_up_to(run_dir / METRICS, step)}
        if (proof := read_proof(run_dir)) is not None:
            files[PROOF] = json.dumps(proof, indent=2).encode()
        return {name: content for name, content in files.items() if content}

    return records
