"""Taking a snapshot in the middle of a run: what may go wrong, and what is then said and done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from snapshot.files import prune
from snapshot.resume import snapshots_in
from snapshot.sharded import reshard
from snapshot.state import RunState, write_snapshot
from training.config import Config
from training.exits import TrainingStopped
from training.report import Report
from training.together import end_if_any_failed


def save_snapshot(
    accelerator: Accelerator,
    config: Config,
    state: RunState,
    model: nn.Module,
    optimizer: Optimizer,
    save_tokenizer: Callable[[Path], None],
    report: Report,
    last: bool,
) -> Path | None:
    """Write the snapshot after `state.step` and remove the oldest. Every process must call this.

    Returns the folder, None where it could not be written: a disk that does not take it costs this
    snapshot and nothing else. It is said, the earlier ones stay, and the next is tried when it is
    due. Raises TrainingStopped when it was the `last` of this attempt.
    """
    root = snapshots_in(Path(config.run.dir))
    reshard(model)  # all of it: compiled whole, the root of FSDP's groups is not in the bare model
    bare_model = accelerator.unwrap_model(model, keep_torch_compile=False)
    if accelerator.scaler is not None:
        state.loss_scaler = accelerator.scaler.state_dict()
    state.skipped_steps = report.skipped
    stopped: TrainingStopped | None = None

    def save_rest(folder: Path) -> None:
        save_tokenizer(folder)
        report.flush()  # a snapshot must not outlive the metrics before it

    saved: Path | None = None
    try:
        saved = report.last_snapshot = write_snapshot(
            root,
            state,
            bare_model,
            optimizer,
            save_rest,
            writer=accelerator.is_main_process,
            piece_bytes=config.snapshot.piece_bytes,
        )
    except OSError as error:
        reason = f"the snapshot of step {state.step} could not be written: {error}."
        if last:
            stopped = TrainingStopped(
                f"{reason} {report.kept()} Make room and start the same command again."
            )
        else:
            report.console.warn(f"{reason} {report.kept()} Training goes on; the next is tried.")
    else:
        if accelerator.is_main_process:
            _prune(root, config.snapshot.keep, state.step, report)
    if last:
        end_if_any_failed(accelerator, stopped)
    return saved


def _prune(root: Path, keep: int, newest: int, report: Report) -> None:
    uploads = report.uploads
    try:
        prune(root, keep, newest, needed=set() if uploads is None else uploads.needed())
    except OSError as error:
        report.console.warn(f"an old snapshot could not be removed: {error}.")
