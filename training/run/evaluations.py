"""Evaluations that outlast an attempt: which snapshot is the best, and one that a kill left out."""

from __future__ import annotations

from pathlib import Path

from config.schema import Config
from snapshot.disk.folder import snapshot_folders, snapshots_in, step_of
from snapshot.disk.state import RunState
from snapshot.start import Start
from store.attempt import Best
from store.records import METRICS
from training.reporting.metrics import held_out_at


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
            for folder in snapshot_folders(self._root):
                if (loss := held_out_at(run_dir / METRICS, step_of(folder))) is not None:
                    self._losses[step_of(folder)] = loss
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
    loss = held_out_at(run_dir / METRICS, step)
    if loss is not None:
        state.update_best_loss(loss)
        return False
    return step % config.train.eval_every == 0 or step >= config.train.max_steps
