"""The launcher of this process, where there is one: its end, its workers, what it was told."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser

from training.distributed.environment import launched, processes_here

PROGRAMS = {"accelerate", "accelerate-launch", "torchrun"}
MODULES = ("accelerate.commands.", "torch.")
"""How the names begin of the modules that python -m runs as a launcher."""


@dataclass(frozen=True)
class Launcher:
    """`accelerate launch` or torchrun, which started this process and waits for it."""

    process: psutil.Process
    command: tuple[str, ...]
    """From the launcher's own name on."""

    @property
    def hands_on(self) -> bool:
        """Whether it hands a SIGTERM on to its workers before it ends, as torch's launcher does."""
        return launched()

    def lives(self) -> bool:
        """Whether it still waits for this process."""
        return os.getppid() == self.process.pid

    def lost_a_worker(self) -> bool:
        """Whether one of the processes that it started here has ended, other than by its SIGTERM.

        A worker whose own end makes the launcher stop the others is gone when they are told. One
        that ends because it is told stays, as a zombie, until the first on the machine has ended:
        the launcher waits for them in that order. So only the first can ask this.
        """
        try:
            return self.lives() and len(self.process.children()) < processes_here()
        except psutil.Error:
            return False

    def stop(self) -> None:
        """Send it SIGTERM, unless it has ended and its number is another process's by now."""
        if self.lives():
            self.process.terminate()


@cache
def launcher() -> Launcher | None:
    """The launcher that started this process; None without. To be called while it lives.

    By the parent's command line. Variables of the environment prove nothing: those that a launcher
    sets may as well be exported in the shell.
    """
    try:
        parent = psutil.Process(os.getppid())
        command = parent.cmdline()
    except psutil.Error:
        return None
    if not command or not Path(command[0]).name.lower().startswith("python"):
        return None  # a shell, whose script may have any word
    for place, word in enumerate(command):
        if Path(word).name in PROGRAMS or (command[place - 1] == "-m" and word.startswith(MODULES)):
            return Launcher(parent, tuple(command[place:]))
    return None


@dataclass(frozen=True)
class LaunchOptions:
    """What `accelerate launch` was told, by its command line and its config file."""

    processes: int
    machines: int
    kind: str
    """How that asks for the processes: '--cpu', or 'distributed_type: MULTI_CPU'."""
    use_cpu: bool
    gpu_ids: str


def launch_options() -> LaunchOptions | None:
    """What `accelerate launch` was told, read as it reads it; None where it did not start this."""
    started_by = launcher()
    if started_by is None or "accelerate" not in Path(started_by.command[0]).name:
        return None
    words = started_by.command[1:]
    words = words[1:] if words[:1] == ("launch",) else words
    try:
        options = launch_command_parser().parse_args(list(words))
        file = None
        if options.config_file or (Path(default_config_file).is_file() and not options.cpu):
            file = load_config_from_file(options.config_file)
    except (SystemExit, OSError, ValueError):  # another version's
        return None

    def either(name: str) -> Any:
        given = getattr(options, name, None)
        return getattr(file, name, None) if given is None else given

    kind = (
        "without --multi_gpu"
        if file is None
        else f"distributed_type: {file.distributed_type.value}"
    )
    return LaunchOptions(
        processes=int(either("num_processes") or 1),
        machines=int(either("num_machines") or 1),
        kind="--cpu" if options.cpu else kind,
        use_cpu=bool(options.cpu or getattr(file, "use_cpu", False)),
        gpu_ids=str(either("gpu_ids") or "all"),
    )


def seconds_since_launch() -> float:
    """Since the launcher was started, or this process where there is none; over all restarts."""
    found = launcher()
    first = psutil.Process() if found is None else found.process
    return time.time() - first.create_time()
