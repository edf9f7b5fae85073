"""Attempts of a run, started by the processes that prove.py was launched as.

The main process decides on each attempt and tells the others, which start their part of it. So an
attempt has the processes, machines and devices of the launch, and may be killed.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from proving.environment import (
    changed_environment,
    for_attempt,
    for_helpers,
    replace_environment,
)
from proving.session import ProvenSession, load_config_of
from proving.task import Outcome, Task, read_facts
from training.distributed.launcher import (
    is_local_main_process,
    is_main_process,
    launched,
    machine_number,
    on_cpu,
    started_processes,
)
from training.run.command import run_command

Main = Callable[..., int]
"""train.py's: a loop over a configuration and a session."""
LOOK_SECONDS = 0.05
LONGEST_WAIT = timedelta(days=7)
"""How long a process waits for the decision of the main process; a lost one ends the wait."""
DEATH_OF_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
IMPORTED = ["train", "datasets", "huggingface_hub.hf_api", "transformers", "matplotlib.figure"]
"""Modules for all attempts; one that is not installed is passed over."""
ROOT = Path(__file__).resolve().parents[1]
TASK, END = "task {}", "end"


class Launch:
    """The processes of prove.py. Each starts its part of the attempts that the main one chooses."""

    def __init__(self, main: Main, words: Sequence[str], folder: Path) -> None:
        """`main` is the loop, `words` are those of train.py; what attempts write is in `folder`.

        Every process must call this, and all but the main one `follow` then.
        """
        self.main, self.words, self.folder = main, list(words), folder
        self.processes = started_processes()
        self.store: Any = None
        if launched():
            self.store, _, _ = next(dist.rendezvous("env://", timeout=LONGEST_WAIT))
        # Forks of a process that has imported everything start at once. CUDA bears no fork.
        self._spawn: Any = multiprocessing.get_context("spawn")
        self._fork: Any = multiprocessing.get_context("forkserver") if on_cpu() else self._spawn
        self._fork.set_forkserver_preload(IMPORTED)
        with changed_environment(for_helpers(ROOT)):
            resource_tracker.ensure_running()
            if on_cpu():
                forkserver.ensure_running()
        self._number = 0

    def run(self, task: Task) -> Outcome:
        """Run an attempt to its end. Only the main process calls this."""
        port, number = _free_port(), self._number
        if self.store is not None and not task.alone:
            content = {"task": asdict(task), "port": port}
            self.store.set(TASK.format(number), json.dumps(content))
            self._number += 1
        code = self._attempt(task, port, number)
        return Outcome(code, self.folder / task.run, self._log(task), read_facts(self._facts(task)))

    def end(self) -> None:
        """Let the other processes end. Only the main process calls this."""
        if self.store is not None:
            self.store.set(TASK.format(self._number), END)

    def follow(self) -> None:
        """Take part in the attempts of the main process until it ends."""
        number = 0
        while True:
            content = self.store.get(TASK.format(number)).decode()
            if content == END:
                return
            order = json.loads(content)
            self._attempt(Task(**order["task"]), order["port"], number)
            number += 1

    def _attempt(self, task: Task, port: int, number: int) -> int:
        """This process's part of an attempt; its exit code.

        When one process is killed, the others are: they would wait for it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        process = (self._spawn if task.fresh else self._fork).Process(
            target=_child,
            args=(
                self.main,
                self.folder,
                self.words,
                task,
                for_attempt(port, task.alone, task.in_float32),
                self._log(task) if is_local_main_process() else None,
                self._facts(task) if is_main_process() else None,
            ),
        )
        process.start()
        failed = f"failed {number}"
        shared = self.store is not None and not task.alone
        try:
            while process.is_alive():
                process.join(LOOK_SECONDS)
                if shared and self.store.check([failed]):
                    process.kill()
        except KeyboardInterrupt:
            process.kill()
            process.join()
            raise
        if process.exitcode and process.exitcode < 0 and shared:
            self.store.set(failed, "")
        return _code_of(process)

    def _log(self, task: Task) -> Path:
        machine = f"-{machine_number()}" * (machine_number() > 0)
        return self.folder / f"{task.name}{machine}.log"

    def _facts(self, task: Task) -> Path:
        return self.folder / f"{task.name}.json"


def _code_of(process: BaseProcess) -> int:
    code = process.exitcode
    assert code is not None
    return code


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


def _child(
    main: Main,
    folder: Path,
    words: list[str],
    task: Task,
    environment: dict[str, str],
    log: Path | None,
    facts: Path | None,
) -> None:
    """The process of an attempt."""
    with suppress(OSError, AttributeError):  # Linux: end with prove.py, however that ends
        ctypes.CDLL(None).prctl(DEATH_OF_PARENT, signal.SIGKILL)
    replace_environment(environment)
    written = os.open(os.devnull if log is None else log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(written, stream.fileno())
    sys.argv = ["train.py", *words]
    session = partial(ProvenSession, task, facts)
    run_command(main, partial(load_config_of, task, folder), session)
