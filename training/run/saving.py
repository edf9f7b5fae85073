"""Snapshots in the middle of a run: when they are written, what may go wrong, what is then said."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from threading import Event, Thread

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from config.schema import Config
from snapshot.disk.files import prune
from snapshot.disk.sharded import is_sharded, reshard
from snapshot.disk.state import RunState, begin_snapshot
from snapshot.errors import SnapshotError
from snapshot.resume import snapshots_in
from training.distributed.agreement import raise_if_any_failed
from training.exits import TrainingStopped
from training.memory import available_memory
from training.reporting.curves import draw_run
from training.reporting.report import Report
from training.run.uploading import hand_over

ROOM = 2
"""Times the memory that writing takes: what must be free for it to be done beside a step."""
NO_ROOM = "Make room and start the same command again."
NO_NUMBERS = (
    "A lower optim.learning_rate or a lower optim.max_grad_norm may carry it past this step."
)
_begun: list[Saving] = []  # at most one; for the end of a run that does not reach its own


class Saving:
    """Writes the snapshots of an attempt, each beside the step that follows it.

    A snapshot is written, hashed and flushed while the next step goes forward and backward, which
    changes nothing that is in it; only the update waits until it is on the disk. So there is never
    a second copy of the whole, and never are more than `snapshot.every` steps lost.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: Config,
        model: nn.Module,
        optimizer: Optimizer,
        save_tokenizer: Callable[[Path], None],
        report: Report,
    ) -> None:
        self.step: int | None = None
        """After which a snapshot was begun last."""
        self._accelerator, self._config, self._report = accelerator, config, report
        self._model, self._optimizer = model, optimizer
        self._save_tokenizer = save_tokenizer
        self._root = snapshots_in(Path(config.run.dir))
        self._stream: torch.Stream | None = None
        self._writer: Thread | None = None
        self._written = Event()
        self._fault: BaseException | None = None
        self._told = False
        _begun[:] = [self]

    def begin(self, state: RunState, sample: str | None, last: bool, stopping: bool) -> None:
        """Begin the snapshot after `state.step`, which goes to the Hub with an earlier `sample`.

        Every process must call this, and then `finish` before the next update. That of the `last`
        step, or of a run that is `stopping`, is finished here; raises TrainingStopped when it
        could not be written. That of the last step goes to the Hub by `publish`.
        """
        accelerator, begun = self._accelerator, time.perf_counter()
        self._join()  # what followed the one before, such as the curves
        self.step = self._report.saved_step = state.step
        reshard(self._model)  # compiled whole, the root of FSDP's groups is not in the bare model
        if accelerator.scaler is not None:
            state.loss_scaler = accelerator.scaler.state_dict()
        state.skipped_steps = self._report.skipped
        self._written.clear()
        try:
            rest = begin_snapshot(
                self._root,
                state,
                accelerator.unwrap_model(self._model, keep_torch_compile=False),
                self._optimizer,
                self._save_rest,
                writer=accelerator.is_main_process,
                piece_bytes=self._config.snapshot.piece_bytes,
            )
        except OSError as error:
            self._fault = error
            self._written.set()
        else:
            publish = None if last else lambda: self.publish(sample)
            if accelerator.is_main_process and not (last or stopping) and self._has_room():
                work = (rest, state.step, begun, self._beside_the_step(), publish)
                self._writer = Thread(target=self._write, args=work, name="snapshot")
                self._writer.start()
            else:
                self._write(rest, state.step, begun, nullcontext(), publish)
        self._report.held.append(time.perf_counter() - begun)
        if last or stopping:
            remedy = NO_NUMBERS if isinstance(self._fault, SnapshotError) else NO_ROOM
            fault = self._refusal()
            raise_if_any_failed(
                accelerator, TrainingStopped(f"{fault} {remedy}") if fault else None
            )

    def finish(self) -> None:
        """Wait until the snapshot that was begun is on the disk. Every process must call this.

        A disk that does not take it, or numbers that are not finite, cost this snapshot and nothing
        else: it is said, the earlier ones stay, and the next is tried when it is due.
        """
        if self._writer is not None and not self._written.is_set():
            if self._stream is not None:  # what the device still computes is no waiting
                torch.accelerator.current_stream(self._accelerator.device).synchronize()
            self._report.held[-1] += self._report.wait_for(self._written.wait)
        if fault := self._refusal():
            self._report.console.warn(f"{fault} Training goes on; the next is tried.")

    def publish(self, sample: str | None, best_loss: float | None = None) -> None:
        """Draw the curves, and offer the newest snapshot for upload."""
        report = self._report
        if self._accelerator.is_main_process:
            draw_run(report.console, self._config)
            saved = report.last_snapshot
            hand_over(report.console, report.uploads, self._config, saved, sample, best_loss)

    def end(self, seconds: float | None = None) -> None:
        """Wait, so long at most, for what was begun before an error, which is as good as any."""
        self._join(seconds)
        if self._fault is not None:
            self._report.console.warn(f"a snapshot could not be written: {self._fault!r}.")

    def _join(self, seconds: float | None = None) -> None:
        if self._writer is not None:
            self._writer.join(seconds)

    def _has_room(self) -> bool:
        """Whether this machine has the memory for a step and a snapshot's writing at once."""
        if self._accelerator.device.type not in ("cpu", "cuda"):
            return False  # others may have no streams
        moments = [tensor for held in self._optimizer.state.values() for tensor in held.values()]
        if any(map(is_sharded, moments)):
            return True  # what takes memory has been done, by all processes together
        sizes = [tensor.numel() * tensor.element_size() for tensor in moments]
        piece = min(sum(sizes), max(self._config.snapshot.piece_bytes, *sizes))
        available = available_memory()
        if available < ROOM * piece and not self._told:
            self._told = True
            self._report.console.say(
                "hint      training waits while a snapshot is written: beside a step it needs "
                f"{ROOM * piece / 1e6:,.0f} MB of memory, and {available / 1e6:,.0f} MB are left."
            )
        return available >= ROOM * piece

    def _beside_the_step(self) -> AbstractContextManager[object]:
        """Where tensors are copied from the device while it computes."""
        device = self._accelerator.device
        if device.type == "cpu":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.Stream(device)
        self._stream.wait_stream(torch.accelerator.current_stream(device))  # for the last update
        return self._stream

    def _write(
        self,
        rest: Callable[[], Path],
        step: int,
        begun: float,
        place: AbstractContextManager[object],
        publish: Callable[[], None] | None,
    ) -> None:
        """The rest of a snapshot, and what follows it. May run in a thread: it raises nothing."""
        report = self._report
        try:
            with place:
                report.last_snapshot = rest()
            report.durable.append(time.perf_counter() - begun)
            self._written.set()
            if self._accelerator.is_main_process:
                self._prune(step)
            if publish is not None:
                publish()
        except BaseException as error:
            self._fault = error
        finally:
            self._written.set()

    def _save_rest(self, folder: Path) -> None:
        self._save_tokenizer(folder)
        self._report.flush()  # a snapshot must not outlive the metrics before it

    def _prune(self, newest: int) -> None:
        report, uploads = self._report, self._report.uploads
        try:
            needed = set() if uploads is None else uploads.needed()
            prune(self._root, self._config.snapshot.keep, newest, needed)
        except (OSError, SnapshotError) as error:
            report.console.warn(f"an old snapshot could not be removed: {error}.")

    def _refusal(self) -> str:
        """Why the snapshot was not written, in sentences; empty where it was."""
        fault, self._fault = self._fault, None
        if fault is None:
            return ""
        if not isinstance(fault, OSError | SnapshotError):
            raise fault
        self._report.saved_step = 0
        reason = f"the snapshot of step {self.step} could not be written: {fault}."
        return f"{reason} {self._report.kept()}"


def finish_writing(seconds: float | None = None) -> None:
    """Give the snapshot that was begun before an error ended the run this long."""
    for saving in _begun:
        saving.end(seconds)
