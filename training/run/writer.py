"""Writes the snapshots of an attempt, each in the background of the steps that follow it."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from config.schema import Config, ConfigError
from data.tokenizer import Tokenizer
from data.tokenizer_files import GENERATION
from model.family import LanguageModel
from model.sharded import is_sharded, reshard
from snapshot.disk.folder import prune, snapshots_in, write_json
from snapshot.disk.model import Adapters
from snapshot.disk.save import Snapshot, Writers, is_coherent
from snapshot.disk.state import RunState
from snapshot.disk.tensors import refuse_other_moments
from snapshot.errors import NumberFault, SnapshotError, Unresumable, is_full
from training.distributed.accelerator import unwrapped
from training.distributed.launcher import is_one_machine
from training.distributed.processes import group_of_threads, is_on_any, raise_if_any_failed
from training.exits import TrainingStopped
from training.memory import memory_left
from training.reporting.curves import Curves
from training.reporting.report import LOWER_RATE, Report
from training.reporting.speed import EVALUATION, SNAPSHOT
from training.run.records import BestSnapshot, hand_over

NO_ROOM = "Free some space and start the same command again."
NO_GRADIENT = (
    "The loss of a step depends on every parameter that is trained: use it in each forward pass, "
    "where a layer is left out as x + 0 * layer(x); or name it in optim.freeze."
)


def room_for_copies() -> int:
    """Bytes that this process may use for copies: its share of half of what is free."""
    return memory_left() // 2


class SnapshotWriter:
    """Writes, hashes and flushes a snapshot while the next steps are computed.

    Forward and backward pass change nothing that it holds. It is copied first, or where memory is
    short the first update waits until it is written. Hashing and flushing take place during later
    steps. The next snapshot waits for the one before.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: Config,
        model: nn.Module,
        optimizer: Optimizer,
        tokenizer: Tokenizer,
        report: Report,
        best: BestSnapshot | None = None,
        adapters: Adapters | None = None,
        generation: dict[str, Any] | None = None,
        own_disks: bool = False,
    ) -> None:
        """`generation` is the content of generation_config.json, if snapshots have one.

        With `own_disks` other machines do not see the run's directory.
        """
        self.pending = False
        """Whether a snapshot has begun that the next update must wait for."""
        self.written: Future[None] | None = None
        """The newest snapshot, and what follows it, until its outcome has been reported."""
        self._accelerator, self._config, self._report = accelerator, config, report
        self._model, self._optimizer, self._best = model, optimizer, best
        self._tokenizer, self._adapters, self._generation = tokenizer, adapters, generation
        self._root, self._curves = snapshots_in(Path(config.run.dir)), Curves(config)
        seconds = max(config.run.start_timeout_seconds, config.run.collective_timeout_seconds)
        bare_model = unwrapped(accelerator, model)
        self._writers = writers_of(accelerator, bare_model, self._root, seconds, own_disks)
        # It copies on one core. Another team of OpenMP threads would outlast the copy, and with
        # more threads than cores libgomp puts training's to sleep at each barrier: 40 % slower.
        self._thread = ThreadPoolExecutor(1, "snapshot", torch.set_num_threads, (1,))
        self._stream: torch.Stream | None = None
        self.sample: str | None = None
        """The newest text that the model has generated, for the model card."""
        self._step = 0
        self._snapshot: Snapshot | None = None

    def begin(self, state: RunState, end: bool) -> None:
        """Begin the snapshot after `state.step`.

        Every process must call this, and `finish` before the next update. The snapshot at the `end`
        of the attempt is finished here; raises TrainingStopped when it cannot be written. `publish`
        uploads that of the last step. Raises ConfigError for a training that no snapshot resumes.
        """
        accelerator, begun = self._accelerator, time.perf_counter()
        self._report.clock.enter(SNAPSHOT)
        if self.written is not None:
            wait([self.written])  # the thread may still draw the curves of the one before
            self._report_fault()
        self._step = state.step
        if accelerator.scaler is not None:
            state.loss_scaler = accelerator.scaler.state_dict()
        state.skipped_steps = self._report.skipped
        try:
            snapshot = self._snapshot = Snapshot(
                self._root,
                state,
                self._resharded(),
                self._optimizer,
                self._save_rest,
                adapters=self._adapters,
                end_of_text=self._tokenizer.end_of_text,
                piece_bytes=self._config.snapshot.piece_bytes,
                writers=self._writers,
            )
        except Unresumable as error:
            raise ConfigError(f"the snapshot of step {state.step}: {error}.") from error
        except SnapshotError as error:
            self.written = Future()
            self.written.set_exception(error)
        else:
            stream, step = self._background_stream(), state.step
            self.written = self._thread.submit(self._write, snapshot, begun, stream, step)
            if end or accelerator.device.type not in ("cpu", "cuda"):  # others may lack streams
                wait([self.written])
        self._report.stall_seconds.append(time.perf_counter() - begun)
        self._report.clock.enter(EVALUATION)
        self.pending = not end
        if end:
            fault = self._fault(at_end=True)
            raise_if_any_failed(accelerator, TrainingStopped(fault) if fault else None)

    def check_update(self, step: int) -> None:
        """Raise ConfigError where the first update of an attempt is none that snapshots resume.

        fp16's loss scaler may have skipped that, so the first snapshot has to find out.
        """
        if self._accelerator.scaler is not None:
            return
        layout = self._resharded().layout()
        try:
            refuse_other_moments(layout, self._optimizer, self._config.optim.name)
        except SnapshotError as error:
            remedy = "" if isinstance(error, Unresumable) else f" {NO_GRADIENT}"
            raise ConfigError(f"after step {step}, {error}.{remedy}") from error

    def _resharded(self) -> LanguageModel:
        """The bare model with the parameters that the optimizer has, also after an evaluation."""
        reshard(self._model)  # a wholly compiled model hides the root of FSDP's groups
        return unwrapped(self._accelerator, self._model)

    def finish(self) -> None:
        """Wait until an update may change what the pending snapshot holds. All call this.

        A disk that refuses it, or numbers that are not finite, cost this snapshot and nothing else:
        the console shows a warning, earlier snapshots stay, and the next one is tried when due.
        """
        is_writing = self.written is not None and not self.written.done()
        if self.pending and is_writing and self._snapshot is not None:
            if self._stream is not None:  # the device's own computing is no stall
                torch.accelerator.current_stream(self._accelerator.device).synchronize()
            begun = time.perf_counter()
            with self._report.clock.within(SNAPSHOT):
                self._snapshot.release()
            self._report.stall_seconds[-1] += time.perf_counter() - begun
        self.pending = False
        if self.written is not None and self.written.done():
            self._report_fault()

    def _report_fault(self) -> None:
        if fault := self._fault():
            self._report.console.warn(fault)

    def _fault(self, at_end: bool = False) -> str:
        """Why the newest snapshot, which has ended, is not written; empty if it is.

        Raises an error of the program.
        """
        assert self.written is not None
        error, self.written = self.written.exception(), None
        if error is None:
            return ""
        if not isinstance(error, OSError | SnapshotError):
            raise error
        what = f"the snapshot of step {self._step} could not be written: {error}."
        remedy = "" if at_end else "Training continues; the next is tried."
        if at_end and isinstance(error, NumberFault):
            remedy = LOWER_RATE
        elif at_end and isinstance(error, OSError) and is_full(error):
            remedy = NO_ROOM
        return f"{what} {self._report.newest_snapshot()} {remedy}".rstrip()

    def publish(self, best_loss: float | None = None) -> None:
        """Draw the curves, and offer the newest snapshot for upload."""
        report = self._report
        if self._accelerator.is_main_process:
            self._curves.draw(report.console, self._tokenizer.unit)
            hand_over(
                report.console,
                report.uploads,
                self._config,
                report.last_snapshot,
                self.sample,
                best_loss,
                self._best,
            )

    def prune(self, newest: int) -> None:
        """Remove the snapshots up to step `newest` that neither the run nor an upload needs."""
        if not self._accelerator.is_main_process:
            return
        report, uploads = self._report, self._report.uploads
        try:
            needed = () if uploads is None else uploads.pending_folders()
            best = None if self._best is None else self._best.newest
            best_step = None if best is None else best.step
            prune(self._root, newest, self._config.snapshot.keep, best_step, needed)
        except (OSError, SnapshotError) as error:
            report.console.warn(f"an old snapshot could not be removed: {error}.")

    def end(self, seconds: float | None = None) -> None:
        """Wait at most so long for a snapshot that began before an error: it is a good one."""
        if seconds is None and self._writers.group is not None and not is_one_machine():
            seconds = self._config.run.collective_timeout_seconds  # another machine may be gone
        if self.written is None or not wait([self.written], seconds).done:
            return
        if (error := self.written.exception()) is not None:
            self._report.console.warn(f"a snapshot could not be written: {error!r}.")

    def close(self) -> None:
        """End what the writing threads have, before training's process group ends."""
        self._thread.shutdown()
        self._writers.end()

    def _background_stream(self) -> torch.Stream | None:
        """The stream that copies tensors from a GPU while it computes; None without CUDA."""
        device = self._accelerator.device
        if device.type != "cuda":
            return None
        if self._stream is None:
            self._stream = torch.Stream(device)
        self._stream.wait_stream(torch.accelerator.current_stream(device))  # for the last update
        return self._stream

    def _write(
        self, snapshot: Snapshot, begun: float, stream: torch.Stream | None, step: int
    ) -> None:
        """Write the snapshot of a step, prune and publish, in the thread."""
        with stream or nullcontext():
            self._report.last_snapshot = snapshot.write(room_for_copies)
        self._report.durable_seconds.append(time.perf_counter() - begun)
        self.prune(step)
        if step < self._config.train.max_steps:
            self.publish()

    def _save_rest(self, folder: Path) -> None:
        self._tokenizer.save(folder)
        if self._generation:
            write_json(folder / GENERATION, self._generation)
        self._report.flush()  # a snapshot must not outlive the metrics before it


def writers_of(
    accelerator: Accelerator, model: nn.Module, root: Path, seconds: float, own_disks: bool
) -> Writers:
    """The processes that write the snapshots of a model. Every process must call this.

    Each writes what it holds of a sharded model; the main process alone where machines have
    `own_disks`, or a file system that may mix what they write. Without an answer for so many
    seconds a process counts as gone.
    """
    alone = Writers(accelerator.process_index)
    if not any(map(is_sharded, model.parameters())):
        return alone
    cannot_share = not is_one_machine() and (own_disks or not is_coherent(root))
    if is_on_any(accelerator, cannot_share):
        return alone
    return replace(alone, group=group_of_threads(seconds))
