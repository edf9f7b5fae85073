"""Evaluations that outlast an attempt: which snapshot is the best, and one that a kill left out."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from operator import itemgetter
from pathlib import Path

from accelerate import Accelerator

from config.schema import Config
from snapshot.disk.folder import folder_name, read_json, snapshots_in, write_whole
from snapshot.disk.state import RunState
from snapshot.errors import SnapshotError
from snapshot.start import Start
from store.attempt import Best
from store.latest import best_in
from store.records import METRICS
from training.distributed.agreement import decided_by_main
from training.reporting.console import Console
from training.reporting.metrics import held_out_at

BEST = "best.json"
"""Step and held-out loss of a run's best snapshot, in its directory."""
TRIES = "evaluation_tries"
"""A file in the run's directory: a step, and how often a resume has begun its evaluation."""
MOST_TRIES = 2
"""An evaluation that crashes each time must not keep the run from training."""


class BestSnapshot:
    """Which snapshot is the best, among those whose step was evaluated. It survives restarts.

    A snapshot is evaluated while it is written, so it becomes the best only when it is there.
    """

    def __init__(self, config: Config, writes: bool, state: RunState, start: Start) -> None:
        """Begin an attempt at `state`. Only the process that `writes` keeps anything."""
        run_dir = Path(config.run.dir)
        self._path, self._root = run_dir / BEST, snapshots_in(run_dir)
        self._keeps = config.snapshot.keep_best and writes
        self._evaluated: dict[int, float] = {}
        self._step, self._loss = 0, math.inf
        if self._keeps:
            self._step, self._loss = min(self._read(), _of_repo(state, start), key=itemgetter(1))
            # A kill may have come between the evaluation and this file.
            if (loss := held_out_at(run_dir / METRICS, state.step)) is not None:
                self.evaluated(state.step, loss)
                self.settle()

    @property
    def newest(self) -> Best | None:
        """The best snapshot so far, if there is one."""
        folder = self._root / folder_name(self._step)
        local = folder if folder.is_dir() else None
        return Best(self._step, self._loss, local) if self._step else None

    def evaluated(self, step: int, loss: float) -> None:
        """Note the held-out loss of a step. `settle` follows when its snapshot is written."""
        self._evaluated = {**self._evaluated, step: loss}

    def settle(self) -> None:
        """Compare the snapshots that were evaluated since, if they are there, with the best."""
        evaluated, self._evaluated = self._evaluated, {}  # two threads may call this
        for step, loss in evaluated.items() if self._keeps else ():
            if loss < self._loss and (self._root / folder_name(step)).is_dir():
                self._step, self._loss = step, loss
                with suppress(OSError):  # on a full disk the run knows it until its end
                    write_whole(self._path, json.dumps({"step": step, "loss": loss}) + "\n")

    def _read(self) -> tuple[int, float]:
        with suppress(SnapshotError):
            found = best_in(read_json(self._path))
            if found is not None and (self._root / folder_name(found[0])).is_dir():
                return found
        return 0, math.inf


def _of_repo(state: RunState, start: Start) -> tuple[int, float]:
    """Step and loss of the best snapshot in the run's repo."""
    latest = start.known_latest
    if latest is None or latest.run_id != state.run_id or latest.best_loss is None:
        return 0, math.inf
    return latest.best_step, latest.best_loss


def evaluation_is_pending(
    accelerator: Accelerator, console: Console, config: Config, start: Start, state: RunState
) -> bool:
    """Whether the step that this attempt resumes from has not been evaluated.

    Every process must call this. Where it has been evaluated, its loss updates `state.best_loss`,
    because the snapshot is older than its evaluation.
    """
    return decided_by_main(accelerator, lambda: _is_pending(console, config, start, state))


def _is_pending(console: Console, config: Config, start: Start, state: RunState) -> bool:
    run_dir, step = Path(config.run.dir), state.step
    if not start.is_in(run_dir):
        return False  # a new run, perhaps from another run's snapshot
    loss = held_out_at(run_dir / METRICS, step)
    if loss is not None:
        state.update_best_loss(loss)
        return False
    if step % config.train.eval_every and step < config.train.max_steps:
        return False
    tries = _tries_of(run_dir / TRIES, step)
    if tries == MOST_TRIES:
        console.warn(
            f"the evaluation of step {step} was interrupted {tries + 1} times and is skipped."
        )
        return False
    with suppress(OSError):  # on a full disk it may be tried more often
        write_whole(run_dir / TRIES, f"{step} {tries + 1}\n")
    return True


def _tries_of(path: Path, step: int) -> int:
    try:
        known, tries = map(int, path.read_text().split())
    except (OSError, ValueError):
        return 0
    return tries if known == step else 0
