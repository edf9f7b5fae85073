"""The session of an attempt of the proof: train.py's loop, stopped, killed and measured.

It records what the checks compare: the text, gradients, seconds and bytes.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from config.compose import load_config
from config.schema import Config, lora_of
from data.corpus import Corpus
from model.family import LanguageModel
from model.frozen import AUTO
from model.sharded import gather_full
from planning.allocation_log import LiveBytes
from planning.estimate import MemoryEstimate
from planning.fake_trace import CUDA_GRANULE, Shape
from proving.launch import Main, Task
from proving.text import Rows, facts_of_text
from snapshot.disk.folder import step_of, write_json
from training.distributed.accelerator import (
    micro_batch_shape,
    replicas,
    unwrapped,
)
from training.distributed.launcher import is_main_process
from training.distributed.sharing import context_size, data_parallel_size, tensor_size
from training.reporting.header import computed_on
from training.run.command import run_command
from training.run.kernels import has_packed_rows
from training.run.run_dir import RunLock
from training.run.session import Session
from training.run.stopping import Agreement, Due

STEPS = 6
"""Steps of the undisturbed attempt, and of those that are killed and stopped."""
IN_STEP, IN_SNAPSHOT, IN_UPLOAD = "a step", "a snapshot", "an upload"
"""Where an attempt kills itself."""
SNAPSHOT_SECONDS = 600
"""The longest that a snapshot is waited for, in the middle of the next step."""
DEATH_OF_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
NEVER = 10**9
"""Steps between evaluations that an attempt does not make."""


def load_config_of(task: Task, folder: Path, arguments: list[str]) -> Config:
    """The configuration of an attempt: that of the words of train.py, with the task's changes.

    It has a directory of its own, no store, and a snapshot of each step. Raises ConfigError as
    `load_config` does.
    """
    config = load_config(arguments)
    config.train.max_steps = max(config.train.max_steps, STEPS + 1)
    config.run.dir = str(folder / task.run)
    config.run.tracker, config.hub.repo_id, config.hub.url = (None,) * 3
    config.snapshot.resume, config.snapshot.every, config.snapshot.keep = "auto", 1, 1
    config.snapshot.keep_best, config.snapshot.every_minutes = False, None
    config.train.eval_every, config.train.sample_every, config.train.log_every = NEVER, 0, 1
    config.run.max_minutes = None
    if task.in_float32:
        config.model.dropout, config.run.reduce_dtype = 0.0, "float32"
    for key, value in task.changes.items():
        section, _, name = key.partition(".")
        setattr(getattr(config, section), name, value)
    return config


class EndAfter(Agreement):
    """Also ends the attempt after a step, on all processes."""

    last_step: int

    def after(self, step: int) -> Due:
        """What is due after `step`. Every process must call this, each step."""
        if step >= self.last_step:
            self.reason = self.reason or "the end of this part of the proof"
        return super().after(step)


class ProvenSession(Session):
    """A session that does what its task says, and records what the checks compare."""

    def __init__(self, task: Task, facts: Path | None, config: Config, lock: RunLock) -> None:
        """The main process writes `facts`; None in the others."""
        super().__init__(config, lock)
        self.task, self._facts_path = task, facts
        self._facts: dict[str, Any] = {"step_seconds": {}}
        self._rows = Rows()
        self._signalled_at: float | None = None
        self._step: int | None = None
        """The step that is computed; None at the start."""

    def begin(self, accelerator: Accelerator) -> None:
        """Begin as `Session` does, and record the gradients of the first step."""
        super().begin(accelerator)
        clip, backward = accelerator.clip_grad_norm_, accelerator.backward

        def recorded(parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
            if self.task.in_float32 and "gradients" not in self._facts:
                self._facts["gradients"] = self._gradient_norms()
            return clip(parameters, max_norm, norm_type)

        def interrupted(loss: Tensor, **options: Any) -> None:
            backward(loss, **options)
            self._interrupt()

        accelerator.clip_grad_norm_ = recorded
        accelerator.backward = interrupted

    def check_text(self, corpus: Corpus) -> None:
        """Check the text as `Session` does."""
        super().check_text(corpus)
        self._facts["first"] = self.next_step

    def open(self, model: LanguageModel) -> None:
        """Open the run as `Session` does, with what the task does to its uploads."""
        super().open(model)
        if self._uploads is not None and self.task.dies_in == IN_UPLOAD:
            # When the contents of a snapshot are in the store, before anybody sees it there.
            self._uploads._store._refuse_moved = lambda *_: _die()  # type: ignore

    def _agree_from(self, step: int) -> Agreement:
        agreement = EndAfter(self.accelerator, self.config, self.signals, step, age=0.0)
        agreement.last_step = self.task.until
        return agreement

    def restore(
        self, model: nn.Module, optimizer: AcceleratedOptimizer, held_out_loader: DataLoaderShard
    ) -> None:
        """Restore as `Session` does, and prepare what the task says."""
        super().restore(model, optimizer, held_out_loader)
        self._optimizer = optimizer.optimizer
        if self.task.describes_run:
            timed = self.report.clock.timed
            self.report.clock.timed = lambda batches: self._rows.recorded(timed(batches))  # type: ignore
        assert self._writer is not None
        if self.task.dies_in == IN_SNAPSHOT and is_main_process():
            self._writer._save_rest = lambda _: _die()  # type: ignore

    def steps(self) -> Iterator[int]:
        """The steps of the attempt; the memory of the last one may be counted."""
        for step in super().steps():
            if self.task.in_float32:
                self._model.eval()  # without dropout
            begun, self._step = time.perf_counter(), step
            if self.task.counts_memory and step == self.task.until:
                on_gpu = self.accelerator.device.type == "cuda"
                memory = LiveBytes(CUDA_GRANULE if on_gpu else 1)
                for one in self._model.parameters():  # what is there already; its kind is not read
                    state = self._optimizer.state.get(one, {}).values()
                    memory.mark([one, one.grad, *state], "parameters")
                with memory:
                    yield step
                self._facts["peak"] = int(memory.log.totals().sum(axis=1).max())
                self._shape = self._planned_shape()
            else:
                yield step
            self._facts["step_seconds"][step] = time.perf_counter() - begun

    def finish_step(self, *figures: Any, **metrics: Any) -> Due:
        """Finish a step as `Session` does; nothing is evaluated."""
        due = super().finish_step(*figures, **metrics)
        return Due(save=due.save and not self.task.counts_memory)

    def end(self) -> int:
        """Record what the attempt was for, and end it as `Session` does."""
        facts, accelerator = self._facts, self.accelerator
        if self.task.counts_memory:
            return self._end_of_count()
        if self.task.describes_run:
            facts["clock"] = dict(self.report.clock.seconds)
            facts["speed_at_peak"] = self.console.speed_at_peak
            if is_main_process():
                width = self.config.data.block_size
                facts["text"] = facts_of_text(self.corpus, width, self._rows)
        facts["parts"] = data_parallel_size(accelerator)
        facts["machine"] = computed_on(accelerator, self.config.run)
        code = super().end()
        snapshot, step = self.report.last_snapshot, self.state.step
        facts["saved"] = step if snapshot is not None and step_of(snapshot) == step else None
        if self._signalled_at is not None:
            facts["stop_seconds"] = time.monotonic() - self._signalled_at
        if self._uploads is not None and (sent := self._uploads.status().sent).seconds:
            facts["sent"] = sent.as_words()
        facts["stalls"], facts["durable"] = self.report.stall_seconds, self.report.durable_seconds
        self._write()
        return code

    def _planned_shape(self) -> Shape:
        """The attempt as the planner knows it."""
        accelerator, config, state = self.accelerator, self.config, self.state
        bare: Any = unwrapped(accelerator, self._model)
        tensor, processes = tensor_size(accelerator), accelerator.num_processes
        copies = replicas(accelerator) if accelerator.is_fsdp2 else processes
        return Shape(
            device=accelerator.device.type,
            precision=accelerator.mixed_precision,
            processes=processes,
            shards=processes // (copies * tensor),
            context=context_size(accelerator),
            tensor=tensor,
            optimizer=config.optim.name,
            freeze=tuple(config.optim.freeze),
            frozen_dtype=state.frozen_dtype or AUTO,
            attention=state.attention,
            packed=has_packed_rows(config, bare, state),
            sync_each=config.run.sync_each_micro_batch,
            reduce_dtype=config.run.reduce_dtype,
            fp8=None if bare.fp8 is None else bare.fp8.recipe,
        )

    def _end_of_count(self) -> int:
        """Predict the peak, for which there must be no process group."""
        micro_batch_size = micro_batch_shape(self.accelerator, self.config)[0]
        accumulates = self.accelerator.gradient_accumulation_steps > 1
        sizes = unwrapped(self.accelerator, self._model).config
        # Sequences of the run's length, which the model's context may exceed.
        sizes = replace(
            sizes, lora=lora_of(self.config.model), block_size=self.config.data.block_size
        )
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()
        if is_main_process():
            self.console.close()
            estimate = MemoryEstimate(sizes, self._shape)
            self._facts["predicted_peak"] = estimate.peak(micro_batch_size, accumulates)
        self._write()
        return 0

    def _write(self) -> None:
        if self._facts_path is not None:
            write_json(self._facts_path, self._facts)

    def _interrupt(self) -> None:
        """After a backward pass, in the step that the task names."""
        if self._step is None or self._step != (self.task.at or self._facts["first"]):
            return
        if self.task.dies_in == IN_STEP and is_main_process():
            end = time.monotonic() + SNAPSHOT_SECONDS
            # The next attempt must resume from one.
            while self.report.last_snapshot is None and time.monotonic() < end:
                time.sleep(0.01)
            _die()
        if self.task.sends_sigterm:
            self._signalled_at = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)

    def _gradient_norms(self) -> dict[str, float | None]:
        """The norm of each gradient of the whole model. Every process must call this."""
        layout = unwrapped(self.accelerator, self._model).layout()
        norms: dict[str, float | None] = {}
        for name, one in layout.trained().items():
            file, _ = layout.place(name)  # processes that share matrices have several parts of one
            norm = None if one.grad is None else float(gather_full(one.grad).double().norm())
            norms[file] = None if norm is None else math.hypot(norm, norms.get(file) or 0.0)
        return norms


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def attempt(
    main: Main,
    folder: Path,
    words: list[str],
    task: Task,
    environment: dict[str, str],
    log: Path,
    facts: Path | None,
) -> None:
    """Do a task as train.py with other words would, and end this process of it."""
    with suppress(OSError, AttributeError):  # Linux: end with prove.py, however that ends
        ctypes.CDLL(None).prctl(DEATH_OF_PARENT, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(environment)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(written, stream.fileno())
    sys.argv = ["train.py", *words]
    run_command(main, partial(load_config_of, task, folder), partial(ProvenSession, task, facts))
