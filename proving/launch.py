"""Attempts of a run, started by the processes that prove.py was launched as.

The main process decides on each attempt and tells the others, which start their part of it. So an
attempt has the processes, machines and devices of the launch, and may be killed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from proving.attempt import Main, Task, attempt
from snapshot.disk.folder import folder_name, read_json, snapshots_in
from store.latest import METRICS
from training.distributed.launcher import (
    is_local_main_process,
    is_main_process,
    launched,
    machine_number,
    on_cpu,
    started_processes,
)
from training.exits import EXIT_DONE
from training.reporting.metrics import read_metrics

KILLED = -9
"""The exit code of an attempt that was killed."""
LOOK_SECONDS = 0.05
LONGEST_WAIT = timedelta(days=7)
"""How long a process waits for the decision of the main process; a lost one ends the wait."""
IMPORTED = ["train", "datasets", "huggingface_hub.hf_api", "transformers", "matplotlib.figure"]
"""Modules for all attempts; one that is not installed is passed over."""
ROOT = Path(__file__).resolve().parents[1]
TASK, END = "task {}", "end"
OF_OTHER_PROCESSES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG", "FSDP_", "PARALLELISM_CONFIG_"),
)
"""Beginnings of what a launcher sets for one of several workers, and for how they share a model."""


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended, and the folder of its run."""

    code: int
    """The exit code of the main process."""
    folder: Path
    log: Path
    facts: dict[str, Any]
    """What its session recorded; empty if it was killed, or failed."""

    @property
    def is_done(self) -> bool:
        """Whether it came to its end."""
        return self.code == EXIT_DONE

    def figures(self, name: str) -> dict[int, float]:
        """A figure of each step of the run so far, such as its loss."""
        records = read_metrics(self.folder / METRICS)
        return {one["step"]: one[name] for one in records if one["event"] == "train"}

    def snapshot(self, step: int) -> Path:
        """Where the snapshot of a step is, if there is one."""
        return snapshots_in(self.folder) / folder_name(step)

    def last_words(self) -> str:
        """The last line that it wrote, for a message."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        return lines[-1] if lines else "it wrote nothing"


class Launch:
    """The processes of prove.py. Each starts its part of the attempts that the main one chooses."""

    def __init__(self, main: Main, words: Sequence[str], folder: Path) -> None:
        """`main` is the loop, `words` are those of train.py; attempts write to `folder`.

        Every process must call this, and all but the main one `follow` then.
        """
        self.main, self.words, self.folder = main, list(words), folder
        self.processes = started_processes()
        self._store: Any = None
        self._number = 0
        if launched():
            self._store, _, _ = next(dist.rendezvous("env://", timeout=LONGEST_WAIT))
        self._spawn: Any = multiprocessing.get_context("spawn")
        # Forks of a process that has imported everything start at once. CUDA bears no fork.
        self._fork: Any = multiprocessing.get_context("forkserver") if on_cpu() else self._spawn
        self._fork.set_forkserver_preload(IMPORTED)
        # The fork server of Python 3.11 ignores sys.path: it would import what the current folder
        # has under the name of a room. Semaphores of killed processes are removed without a word.
        os.environ |= {
            "PYTHONSAFEPATH": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.getenv("PYTHONPATH")))),
            "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker",
            "MPLBACKEND": "agg",
        }

    def run(self, task: Task) -> Outcome:
        """Run an attempt to its end. Only the main process calls this."""
        with socket.socket() as free:
            free.bind(("", 0))
            port = int(free.getsockname()[1])
        if self._store is not None and not task.alone:
            order = json.dumps({"task": asdict(task), "port": port})
            self._store.set(TASK.format(self._number), order)
            self._number += 1
        code, facts = self._attempt(task, port), self._facts(task)
        found = read_json(facts) if facts.exists() else {}
        return Outcome(code, self.folder / task.run, self._log(task), found)

    def remove(self, *runs: str) -> None:
        """Remove what attempts have written, but for their logs."""
        for name in runs:
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def end(self) -> None:
        """Let the other processes end. Only the main process calls this."""
        if self._store is not None:
            self._store.set(TASK.format(self._number), END)

    def follow(self) -> None:
        """Take part in the attempts of the main process until it ends."""
        while (content := self._store.get(TASK.format(self._number)).decode()) != END:
            order = json.loads(content)
            self._number += 1
            self._attempt(Task(**order["task"]), order["port"])

    def _attempt(self, task: Task, port: int) -> int:
        """This process's part of an attempt; its exit code.

        When one process is killed, the others are: they would wait for it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        process = (self._spawn if task.fresh else self._fork).Process(
            target=attempt,
            args=(
                self.main,
                self.folder,
                self.words,
                task,
                environment_of(task, port),
                self._log(task) if is_local_main_process() else Path(os.devnull),
                self._facts(task) if is_main_process() else None,
            ),
        )
        process.start()
        failed = f"failed {self._number}"
        shared = self._store is not None and not task.alone
        try:
            while process.is_alive():
                process.join(LOOK_SECONDS)
                if shared and self._store.check([failed]):
                    process.kill()
        except KeyboardInterrupt:
            process.kill()
            process.join()
            raise
        code: int = process.exitcode
        if code < 0 and shared:
            self._store.set(failed, "")
        return code

    def _log(self, task: Task) -> Path:
        machine = f"-{machine_number()}" * (machine_number() > 0)
        return self.folder / f"{task.name}{machine}.log"

    def _facts(self, task: Task) -> Path:
        return self.folder / f"{task.name}.json"


def environment_of(task: Task, port: int) -> dict[str, str]:
    """The variables of a process that does this worker's part of an attempt.

    Its processes meet at `port` of the first machine. Alone, it is the only one of them, and has
    the whole model.
    """
    changes = {"MASTER_PORT": str(port)} if launched() and not task.alone else {}
    if task.in_float32:  # whatever the accelerate config file says
        changes["ACCELERATE_MIXED_PRECISION"] = "no"
    # The launcher of the attempt is another one.
    removed = ("TORCHELASTIC_", *(OF_OTHER_PROCESSES if task.alone else ()))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(removed)}
    return kept | changes
