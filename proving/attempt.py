"""The session of an attempt of the proof: train.py's loop, stopped, killed and measured.

It records what the checks compare.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from config.compose import load_config
from config.schema import Config
from model.family import LanguageModel
from proving.text import Rows, facts_of_text
from snapshot.disk.folder import write_json
from training.distributed.launcher import is_main_process
from training.distributed.sharing import data_parallel_size
from training.run.command import run_command
from training.run.run_dir import RunLock
from training.run.session import Session
from training.run.stopping import Due

STEPS = 6
"""Steps of the undisturbed attempt, and of those that are killed and stopped."""
IN_STEP, IN_SNAPSHOT, IN_UPLOAD, SIGTERM = "a step", "a snapshot", "an upload", "SIGTERM"
"""Where an attempt kills itself, as `kill -9` would, or the signal that it sends itself."""
DEATH_OF_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
NEVER = 10**9
"""Steps between evaluations that an attempt does not make."""
Main = Callable[..., int]
"""train.py's: a loop over a configuration and a session."""


@dataclass(frozen=True)
class Task:
    """What an attempt does besides training up to a step."""

    name: str
    run: str
    """The folder of its run, in the folder of the proof; that of an earlier attempt resumes it."""
    until: int = STEPS
    """The last step."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the configuration that differ from the run's, with their values."""
    ended_by: str | None = None
    """What ends it before: IN_STEP and its like."""
    alone: bool = False
    """Whether one process computes, whatever the number of launched ones."""
    in_float32: bool = False
    """Compute in float32 and without dropout, so that rounding and masks differ in no shape."""
    describes_text: bool = False
    """Record what the text is."""
    fresh: bool = False
    """Start in a new interpreter, which shares nothing with other attempts, as their hash seed."""


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
        config.model.dropout = 0.0
    for key, value in task.changes.items():
        section, _, name = key.partition(".")
        setattr(getattr(config, section), name, value)
    return config


class ProvenSession(Session):
    """A session that does what its task says, and records what the checks compare."""

    def __init__(self, task: Task, facts: Path | None, config: Config, lock: RunLock) -> None:
        """The main process writes `facts`; None in the others."""
        super().__init__(config, lock)
        self.task, self._facts_path = task, facts
        self._facts: dict[str, Any] = {}
        self._rows = Rows()
        self._signalled_at: float | None = None
        self._step: int | None = None
        """The step that is computed; None at the start."""

    def begin(self, accelerator: Accelerator) -> None:
        """Begin as `Session` does; what ends the attempt comes after a backward pass."""
        super().begin(accelerator)
        backward = accelerator.backward

        def interrupted(loss: Tensor, **options: Any) -> None:
            backward(loss, **options)
            self._interrupt()

        accelerator.backward = interrupted

    def open(self, model: LanguageModel) -> None:
        """Open the run as `Session` does, with what the task does to its uploads."""
        super().open(model)
        if self._uploads is not None and self.task.ended_by == IN_UPLOAD:
            # When the contents of a snapshot are in the store, before anybody sees it there.
            for next_call in ("_refuse_moved", "_commit"):  # of files, and of a repo
                setattr(self._uploads._store, next_call, lambda *_: _die())

    def restore(
        self, model: nn.Module, optimizer: AcceleratedOptimizer, held_out_loader: DataLoaderShard
    ) -> None:
        """Restore as `Session` does, and prepare what the task says."""
        super().restore(model, optimizer, held_out_loader)
        if self.task.describes_text:
            clock, timed = self.report.clock, self.report.clock.timed
            clock.timed = lambda batches: self._rows.recorded(timed(batches))  # type: ignore
        assert self._writer is not None
        if self.task.ended_by == IN_SNAPSHOT and is_main_process():
            self._writer._save_rest = lambda _: _die()  # type: ignore

    def steps(self) -> Iterator[int]:
        """The steps of the attempt."""
        for step in super().steps():
            if self.task.in_float32:
                self._model.eval()  # without dropout
            self._facts.setdefault("first", step)
            self._step = step
            yield step

    def finish_step(self, step: int, /, *figures: Any, **metrics: Any) -> Due:
        """Finish a step as `Session` does; the last one of the task ends the attempt."""
        if step >= self.task.until and not self._agreement.reason:
            self._agreement.reason = "the end of this part of the proof"
        return super().finish_step(step, *figures, **metrics)

    def end(self) -> int:
        """Record what the attempt was for, and end it as `Session` does."""
        facts = self._facts
        if self.task.describes_text and is_main_process():
            facts["text"] = facts_of_text(self.corpus, self.config.data.block_size, self._rows)
        facts["parts"] = data_parallel_size(self.accelerator)
        code = super().end()
        facts["step"] = self.state.step
        if self._signalled_at is not None:
            facts["stop_seconds"] = time.monotonic() - self._signalled_at
        if self._facts_path is not None:
            write_json(self._facts_path, facts)
        return code

    def _interrupt(self) -> None:
        """After a backward pass, in the step that the task names."""
        how = self.task.ended_by
        # The second update waits for the snapshot of the first step: it is there in the third.
        if self._step is None or self._step != self._facts["first"] + 2 * (how == IN_STEP):
            return
        if how == IN_STEP and is_main_process():
            _die()
        if how == SIGTERM:
            self._signalled_at = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)


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
