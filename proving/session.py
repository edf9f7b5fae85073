"""The session of an attempt of the proof: train.py's loop, stopped, killed and measured."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from config.compose import load_config
from config.schema import Config
from data.corpus import Corpus
from model.family import LanguageModel
from model.sharded import gather_full, is_sharded, local_part
from planning.allocation_log import LiveBytes
from planning.fake_trace import CUDA_GRANULE
from proving.memory import Planned, track_kinds
from proving.rows import Rows
from proving.task import IN_SNAPSHOT, IN_STEP, IN_UPLOAD, STEPS, Task
from proving.text import facts_of_text
from snapshot.disk.folder import step_of, write_json
from snapshot.disk.load import TIE
from training.distributed.accelerator import split_of, unwrapped
from training.distributed.launcher import is_main_process
from training.reporting.header import computed_on
from training.run.run_dir import RunLock
from training.run.session import Session
from training.run.stopping import Agreement, Due

SNAPSHOT_SECONDS = 600
"""The longest that a snapshot is waited for, in the middle of the next step."""
NEVER = 10**9
"""Steps between evaluations that an attempt does not make."""
END_OF_TASK = "the end of this part of the proof"


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
        config.model.dropout, config.run.tf32 = 0.0, False
        config.run.reduce_dtype = "float32"
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
            self.reason = self.reason or END_OF_TASK
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
        self._first = self.next_step

    def open(self, model: LanguageModel) -> None:
        """Open the run as `Session` does, with what the task does to its uploads."""
        super().open(model)
        if self._uploads is not None and self.task.dies_in == IN_UPLOAD:
            _die_after_contents(self._uploads._store)

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
            self._before = self._sums()
        self.report.clock.timed = self._rows.recorded(self.report.clock.timed)  # type: ignore
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
                with track_kinds(memory, self._model, self._optimizer):
                    yield step
                self._peak = int(memory.log.totals().sum(axis=1).max())
                self._planned = Planned.of(self, self._model)
            else:
                yield step
            self._facts["step_seconds"][step] = time.perf_counter() - begun

    def finish_step(self, *figures: Any, **metrics: Any) -> Due:
        """Finish a step as `Session` does; nothing is evaluated."""
        due = super().finish_step(*figures, **metrics)
        self._rows.end_step(self.state.step)
        return Due(save=due.save and not self.task.counts_memory)

    def end(self) -> int:
        """Record what the attempt was for, and end it as `Session` does."""
        self._facts["first"] = self._first
        if self.task.in_float32:
            self._facts["rows"] = self._rows.of_all(self.accelerator)
        if self.task.describes_run:
            self._describe_run()
        if self.task.counts_memory:
            return self._end_of_count()
        split = split_of(self.accelerator, self.config.train)
        self._facts["micro_batch"] = split.micro_batch
        self._facts["accumulation"] = split.accumulation
        self._facts["parts"] = split.parts
        self._facts["machine"] = computed_on(self.accelerator, self.config.run)
        self._facts["precision"] = self.accelerator.mixed_precision
        code = super().end()
        self._facts["saved"] = self._saved()
        if self._signalled_at is not None:
            self._facts["stop_seconds"] = time.monotonic() - self._signalled_at
        if self._uploads is not None and (sent := self._uploads.status().sent).seconds:
            self._facts["sent"] = sent.as_words()
        self._facts["stalls"] = self.report.stall_seconds
        self._facts["durable"] = self.report.durable_seconds
        self._write()
        return code

    def _describe_run(self) -> None:
        """Record what is asked of the undisturbed attempt alone. Every process must call this."""
        self._facts["unmoved"] = self._unmoved()
        self._facts["replicas"] = self._difference_of_replicas()
        self._facts["tied"] = self._ties()
        self._record_speed()
        if is_main_process():
            self._facts["text"] = facts_of_text(self.corpus, self.config, self._rows)

    def _end_of_count(self) -> int:
        """Predict the peak, for which there must be no process group."""
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()
        if is_main_process():
            self.console.close()
            self._facts["peak"] = self._peak
            self._facts["predicted_peak"] = self._planned.peak()
        self._write()
        return 0

    def _write(self) -> None:
        if self._facts_path is not None:
            write_json(self._facts_path, self._facts)

    def _interrupt(self) -> None:
        """After a backward pass, in the step that the task names."""
        if self._step is None or self._step != (self.task.at or self._first):
            return
        if self.task.dies_in == IN_STEP and is_main_process():
            self._await_snapshot()
            _die()
        if self.task.sends_sigterm:
            self._signalled_at = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)

    def _await_snapshot(self) -> None:
        """Wait until one is on disk, which the next attempt must resume from."""
        end = time.monotonic() + SNAPSHOT_SECONDS
        while self.report.last_snapshot is None and time.monotonic() < end:
            time.sleep(0.01)

    def _saved(self) -> int | None:
        """The last step, if there is a snapshot of it."""
        found = self.report.last_snapshot
        step = self.state.step
        return step if found is not None and step_of(found) == step else None

    def _sums(self) -> dict[str, float]:
        """The sum of what this process has of each trained parameter, by name."""
        return {
            name: float(local_part(one.detach()).double().sum())
            for name, one in self._model.named_parameters()
            if one.requires_grad
        }

    def _unmoved(self) -> list[str]:
        """The parameters that no update of this attempt has changed. Every process must call it."""
        now = self._sums()
        moved = torch.tensor([int(now[name] != self._before[name]) for name in now])
        moved = self.accelerator.reduce(moved.to(self.accelerator.device))
        return [name for name, times in zip(now, moved.tolist(), strict=True) if not times]

    def _gradient_norms(self) -> dict[str, float | None]:
        """The norm of each gradient of the whole model. Every process must call this."""
        layout = unwrapped(self.accelerator, self._model).layout()
        return {
            name: None if one.grad is None else float(_whole_gradient(one).double().norm())
            for name, one in layout.trained().items()
        }

    def _ties(self) -> bool | None:
        """Whether the two matrices are equal that config.json ties; None if it ties none.

        Every process must call this.
        """
        model = unwrapped(self.accelerator, self._model)
        first: Any = model.get_input_embeddings()
        last: Any = model.get_output_embeddings()
        if not model.config.config_json().get(TIE):
            return None
        return bool(gather_full(first.weight).equal(gather_full(last.weight)))

    def _difference_of_replicas(self) -> float | None:
        """The largest, of weights of which each process has a copy; None if it has a part."""
        parameters = list(self._model.parameters())
        if self.accelerator.num_processes == 1 or any(map(is_sharded, parameters)):
            return None
        worst = torch.zeros((), device=self.accelerator.device)
        for one in parameters:
            sums = torch.stack([one.detach().float().sum(), one.detach().float().abs().max()])
            by_process = self.accelerator.gather(sums[None])
            worst = torch.maximum(worst, (by_process - by_process[0]).abs().max())
        return float(worst)

    def _record_speed(self) -> None:
        speed = self.console.speed
        self._facts["clock"] = dict(self.report.clock.seconds)
        self._facts["flops_per_token"] = None if speed is None else speed.flops_per_token
        self._facts["peak_flops"] = None if speed is None else speed.peak


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_after_contents(store: Any) -> None:
    """Die when the contents of a snapshot are in a store, before anybody sees it there."""
    store._refuse_moved = lambda *_: _die()


def _whole_gradient(parameter: nn.Parameter) -> Tensor:
    """All processes' gradient of a parameter, which alone says how they are cut."""
    assert parameter.grad is not None
    return gather_full(parameter.grad)
