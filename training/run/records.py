"""A run's records: its metrics, those of other machines, and which step is the best."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

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
    MetricsFile,
    add_fetched,
    held_out_losses,
    metrics_up_to,
    newest_step,
)
from training.run.run_dir import not_writable


def begin_records(console: Console, config: Config, start: Start, state: RunState) -> None:
    """Write config.yaml, and continue metrics.jsonl, also with what other machines recorded.

    Only the main process calls this. Raises ConfigError where the disk refuses it.
    """
    run_dir = Path(config.run.dir)
    # A run that begins from another run's snapshot has no lines of its own yet.
    step = state.step if start.is_in(run_dir) else 0
    problem = fetch_missing(config, start, state)
    try:
        # This comes first, because it makes the folder a run's.
        write_whole(run_dir / CONFIG_FILE, as_yaml(config).encode())
        metrics = MetricsFile(run_dir / METRICS, step, state.attempt_id)
    except OSError as error:
        raise not_writable(run_dir, error) from error
    console.metrics = metrics
    if problem:
        console.warn(problem)
    metrics.add_event("start", state.step, "resumed" if start.folder else "from scratch")
    metrics.add_event("machine", state.step, state.computed_on or "")
    if start.state is not None:
        for change in changed_values(start.state.config, as_plain(config)):
            metrics.add_event("changed", state.step, change)


def fetch_missing(config: Config, start: Start, state: RunState) -> str:
    """Fetch the metrics of steps that another machine took, where this disk lacks them.

    Returns why that failed, or an empty text.
    """
    run_dir, contents = Path(config.run.dir), start.contents
    if contents is None or contents.latest is None or contents.latest.run_id != state.run_id:
        return ""
    try:
        if newest_step(run_dir / METRICS) >= state.step:
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


def metrics_for_upload(config: Config, step: int) -> dict[str, bytes]:
    """What the upload of a step adds of the records: `store.attempt.UploadTarget.records`."""
    content = metrics_up_to(Path(config.run.dir) / METRICS, step)
    return {METRICS: content} if content else {}


class BestSnapshot:
    """Which snapshot has the lowest held-out loss, among those on this disk and in the store.

    A step is evaluated while its snapshot is written, so the two meet when the best is asked for.
    """

    def __init__(self, config: Config, is_main: bool, state: RunState, start: Start) -> None:
        """Begin an attempt at `state`. Only the main process knows the best."""
        run_dir, latest = Path(config.run.dir), start.known_latest
        self._root, self._is_known = snapshots_in(run_dir), config.snapshot.keep_best and is_main
        self._losses = held_out_losses(run_dir / METRICS) if self._is_known else {}  # by step
        self._in_store: list[Best] = []
        if latest is not None and latest.run_id == state.run_id and latest.best_loss is not None:
            self._in_store = [Best(latest.best_step, latest.best_loss)]

    @property
    def newest(self) -> Best | None:
        """The best snapshot so far, if there is one. Any thread may ask."""
        if not self._is_known:
            return None
        losses = dict(self._losses)  # the main thread may add one meanwhile
        steps = map(step_of, snapshot_folders(self._root))
        here = [Best(step, losses[step]) for step in steps if step in losses]
        return min(here + self._in_store, key=lambda best: best.loss, default=None)

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
    loss = held_out_losses(run_dir / METRICS, since=step).get(step)
    if loss is not None:
        state.update_best_loss(loss)
        return False
    return step % config.train.eval_every == 0 or step >= config.train.max_steps
