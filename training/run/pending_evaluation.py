"""The evaluation that follows a snapshot, where a kill came between the two."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from accelerate import Accelerator

from config.schema import Config
from snapshot.disk.files import snapshots_in, write_whole
from snapshot.disk.state import RunState
from snapshot.start import Start
from training.distributed.agreement import broadcast_text
from training.reporting.console import Console
from training.reporting.metrics import held_out_at

TRIES = "evaluation_tries"
"""A file in the run's directory: a step, and how often a resume has begun its evaluation."""
MOST_TRIES = 2
"""An evaluation that crashes each time must not keep the run from training."""


def evaluation_is_pending(
    accelerator: Accelerator, console: Console, config: Config, start: Start, state: RunState
) -> bool:
    """Whether the step that this attempt resumes from has not been evaluated.

    Every process must call this. Where it has been evaluated, its loss updates `state.best_loss`,
    because the snapshot is older than its evaluation.
    """
    pending = accelerator.is_main_process and _is_pending(console, config, start, state)
    return bool(broadcast_text(accelerator, "pending" if pending else ""))


def _is_pending(console: Console, config: Config, start: Start, state: RunState) -> bool:
    run_dir, step = Path(config.run.dir), state.step
    if start.folder is None or start.folder.parent != snapshots_in(run_dir):
        return False  # a new run, perhaps from another run's snapshot
    loss = held_out_at(run_dir / "metrics.jsonl", step)
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
