"""Snapshots in the middle of a run: when they are written, what may go wrong, what is then said."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from threading import Thread

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from snapshot.files import prune
from snapshot.resume import snapshots_in
from snapshot.sharded import reshard
from snapshot.state import RunState, begin_snapshot
from training.config import Config
from training.curves import draw_run
from training.exits import TrainingStopped
from training.memory import available_memory
from training.report import Report
from training.together import end_if_any_failed
from training.uploading import hand_over

ROOM = 2
"""Times the memory that writing takes: what must be free for it to be done beside a step."""
_writers: list[Thread] = []  # at most one; for the end of a run that does not reach its own


class Saving:
    """Writes the snapshots of an attempt, each beside the step that follows it.

    A snapshot is written, hashed and flushed while the next step goes forward and backward, which
    changes nothing that is in it; only the update waits until it is on the disk. So there is no
    copy of it in memory, and never are more than `snapshot.every` steps lost.
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
        self._writer: Thread | None = None
        self._fault: Exception | None = None
        self._told = False

    def begin(self, state: RunState, sample: str | None, begun: float, last: bool) -> None:
        """Begin the snapshot after `state.step`, which goes to the Hub with a `sample`.

        Every process must call this, and then `finish` before the next update. The `last` of this
        attempt is finished here; raises TrainingStopped when it could not be written. `begun` is
        the time.perf_counter() since which training waits for it.
        """
        accelerator = self._accelerator
        self.step = state.step
        reshard(self._model)  # compiled whole, the root of FSDP's groups is not in the bare model
        if accelerator.scaler is not None:
            state.loss_scaler = accelerator.scaler.state_dict()
        state.skipped_steps = self._report.skipped
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
        else:
            if accelerator.is_main_process and not last and self._has_room():
                work = (rest, sample, begun, self._beside_the_step())
                self._writer = Thread(target=self._write, args=work, name="snapshot")
                _writers.append(self._writer)
                self._writer.start()
            else:
                self._write(rest, sample, begun, nullcontext())
        self._report.held.append(time.perf_counter() - begun)
        if last:
            fault = self._refusal()
            remedy = "Make room and start the same command again."
            end_if_any_failed(accelerator, TrainingStopped(f"{fault} {remedy}") if fault else None)

    def finish(self) -> None:
        """Wait until the snapshot that was begun is on the disk. Every process must call this.

        A disk that does not take it costs this snapshot and nothing else: it is said, the earlier
        ones stay, and the next is tried when it is due.
        """
        if self._writer is not None:
            self._report.held[-1] += self._report.wait_for(self._writer.join)
            self._writer = None
            _writers.clear()
        if fault := self._refusal():
            self._report.console.warn(f"{fault} Training goes on; the next is tried.")

    def _has_room(self) -> bool:
        """Whether this machine has the memory for a step and a snapshot's writing at once."""
        if self._accelerator.device.type not in ("cpu", "cuda"):
            return False  # others may have no streams
        whole = sum(
            tensor.numel() * tensor.element_size()
            for held in self._optimizer.state.values()
            for tensor in held.values()
        )
        needed = ROOM * min(whole, self._config.snapshot.piece_bytes)
        available = available_memory()
        if available < needed and not self._told:
            self._told = True
            self._report.console.say(
                f"hint      training waits while a snapshot is written: beside a step it takes "
                f"{needed / 1e6:,.0f} MB of memory, and {available / 1e6:,.0f} MB are left."
            )
        return available >= needed

    def _beside_the_step(self) -> AbstractContextManager[object]:
        """Where tensors are copied from the device while it computes."""
        device = self._accelerator.device
        if device.type == "cpu":
            return nullcontext()
        stream = torch.Stream(device)
        stream.wait_stream(torch.accelerator.current_stream(device))  # for this step's update
        return stream

    def _write(
        self,
        rest: Callable[[], Path],
        sample: str | None,
        begun: float,
        place: AbstractContextManager[object],
    ) -> None:
        """The rest of a snapshot, and what follows it. May run in a thread: it raises nothing."""
        report = self._report
        try:
            with place:
                report.last_snapshot = rest()
            report.durable.append(time.perf_counter() - begun)
            if self._accelerator.is_main_process:
                self._prune()
                draw_run(report.console, self._config)
                hand_over(
                    report.console, report.uploads, self._config, report.last_snapshot, sample
                )
        except Exception as error:
            self._fault = error

    def _save_rest(self, folder: Path) -> None:
        self._save_tokenizer(folder)
        self._report.flush()  # a snapshot must not outlive the metrics before it

    def _prune(self) -> None:
        report, uploads = self._report, self._report.uploads
        assert self.step is not None
        try:
            needed = set() if uploads is None else uploads.needed()
            prune(self._root, self._config.snapshot.keep, self.step, needed)
        except OSError as error:
            report.console.warn(f"an old snapshot could not be removed: {error}.")

    def _refusal(self) -> str:
        """What the disk had against the snapshot, in sentences; empty when nothing."""
        fault, self._fault = self._fault, None
        if fault is None:
            return ""
        if not isinstance(fault, OSError):
            raise fault
        reason = f"the snapshot of step {self.step} could not be written: {fault}."
        return f"{reason} {self._report.kept()}"


def finish_writing() -> None:
    """Wait for a snapshot that was begun when its run came to an end: it is as good as any."""
    for writer in _writers:
        writer.join()
