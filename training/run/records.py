"""A run's records: its metrics, those of other machines, what is uploaded, which step is best."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common.retries import with_retries
from config.schema import Config, ConfigError
from config.stored import CONFIG_FILE, as_plain, as_yaml
from snapshot.config_values import changed_values
from snapshot.disk.folder import snapshot_folders, snapshots_in, step_of, write_whole
from snapshot.disk.state import RunState
from snapshot.errors import SnapshotError
from snapshot.start import Start
from store.attempt import Best
from store.errors import StoreError
from store.fetch import fetch_metrics
from store.latest import METRICS
from training.reporting.console import Console
from training.reporting.metrics import (
    Events,
    MetricsFile,
    add_fetched,
    held_out_losses,
    metrics_up_to,
    newest_step,
)
from training.run.run_dir import not_writable

PROOF = "proof.json"


def begin_records(console: Console, config: Config, start: Start, state: RunState) -> MetricsFile:
    """Write config.yaml, and continue metrics.jsonl, also with what other machines recorded.

    Only the main process calls this. Raises ConfigError where the disk refuses it, or where it is
    no metrics file.
    """
    run_dir = Path(config.run.dir)
    # A run that begins from another run's snapshot has no lines of its own yet.
    step = state.step if start.is_in(run_dir) else 0
    problem = fetch_missing(config, start, state)
    try:
        write_whole(
            run_dir / CONFIG_FILE, as_yaml(config).encode()
        )  # first: it makes the folder a run's
        metrics = MetricsFile(run_dir / METRICS, step)
    except OSError as error:
        raise not_writable(run_dir, error) from error
    console.events = Events(metrics, state.attempt_id)
    if problem:
        console.warn(problem)
    console.note("start", state.step, _origin(config, start))
    console.note("machine", state.step, state.computed_on or "")
    if start.state is not None:
        for change in changed_values(start.state.config, as_plain(config)):
            console.note("changed", state.step, change)
    return metrics


def _origin(config: Config, start: Start) -> str:
    """Where the attempt starts."""
    if start.folder is None:
        return "from scratch"
    if not start.is_in(Path(config.run.dir)):
        return "from the snapshot of another run"
    return f"resumed from the {'Hub' if start.fetched else 'disk'}"


def fetch_missing(config: Config, start: Start, state: RunState) -> str:
    """Fetch the metrics of steps that another machine took, where this disk lacks them.

    Returns why that failed, or an empty text.
    """
    run_dir, contents = Path(config.run.dir), start.contents
    latest = None if contents is None else contents.latest
    if contents is None or latest is None or latest.run_id != state.run_id:
        return ""
    try:
        newest = newest_step(run_dir / METRICS)
        if newest is not None and newest >= state.step:
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


class BestSnapshot:
    """Which snapshot has the lowest held-out loss, among those on this disk and in the store.

    A step is evaluated while its snapshot is written, so the two meet when the best is asked for.
    """

    def __init__(self, config: Config, is_main: bool, state: RunState, start: Start) -> None:
        """Begin an attempt at `state`. Only the main process knows the best."""
        run_dir = Path(config.run.dir)
        self._root, self._is_known = snapshots_in(run_dir), config.snapshot.keep_best and is_main
        self._losses: dict[int, float] = {}  # by step
        self._in_store: Best | None = None
        if self._is_known:
            losses = held_out_losses(run_dir / METRICS)
            here = map(step_of, snapshot_folders(self._root))
            self._losses = {step: losses[step] for step in here if step in losses}
            latest = start.known_latest
            if latest is None or latest.run_id != state.run_id or latest.best_loss is None:
                return
            self._in_store = Best(latest.best_step, latest.best_loss, None)

    @property
    def newest(self) -> Best | None:
        """The best snapshot so far, if there is one. Any thread may ask."""
        if not self._is_known:
            return None
        losses = dict(self._losses)  # the main thread may add one meanwhile
        here = [
            Best(step_of(folder), losses[step_of(folder)], folder)
            for folder in snapshot_folders(self._root)
            if step_of(folder) in losses
        ]
        in_store = [] if self._in_store is None else [self._in_store]
        return min(here + in_store, key=lambda best: best.loss, default=None)

    def evaluated(self, step: int, loss: float) -> None:
        """Note the held-out loss of a step, whose snapshot may still be written."""
        self._losses[step] = loss


def evaluation_is_pending(config: Config, start: Start, state: RunState) -> bool:
    """Whether the step that this attempt resumes from has not been evaluated; main process only.

    Where it has been, its loss updates `state.best_loss`, because the snapshot is older than its
    evaluation.
    """
    run_dir, step = Path(config.run.dir), state.step
    if not start.is_in(run_dir):
        return False  # a new run, perhaps from another run's snapshot
    loss = held_out_losses(run_dir / METRICS).get(step)
    if loss is not None:
        state.update_best_loss(loss)
        return False
    return step % config.train.eval_every == 0 or step >= config.train.max_steps
