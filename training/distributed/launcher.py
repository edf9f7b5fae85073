"""The launcher that started this process, if there is one: its workers and its end."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from training.distributed.environment import launched, processes_here

PROGRAMS = {"accelerate", "accelerate-launch", "torchrun"}
MODULES = ("accelerate.commands.", "torch.")
"""Prefixes of the modules that `python -m` runs as a launcher."""


@dataclass(frozen=True)
class Launcher:
    """`accelerate launch` or torchrun, which started this process and waits for it."""

    process: psutil.Process
    command: tuple[str, ...]
    """The command line, starting with the launcher's own name."""

    @property
    def forwards_sigterm(self) -> bool:
        """Whether it forwards a SIGTERM to its workers before it ends, as torch's launcher does."""
        return launched()

    def is_alive(self) -> bool:
        """Whether it still waits for this process."""
        return os.getppid() == self.process.pid

    def lost_a_worker(self) -> bool:
        """Whether one of the processes that it started here has ended without its SIGTERM.

        When a worker's own end makes the launcher stop the others, that worker is gone by then. A
        worker that the launcher stops stays a zombie until the first worker of the machine has
        ended, because the launcher waits for them in that order. So only the first worker may call
        this.
        """
        try:
            return self.is_alive() and len(self.process.children()) < processes_here()
        except psutil.Error:
            return False

    def stop(self) -> None:
        """Send it SIGTERM, unless it has ended: its number may be another process's by now."""
        if self.is_alive():
            self.process.terminate()


@cache
def launcher() -> Launcher | None:
    """The launcher that started this process, or None. Call this while the launcher is alive.

    It is recognized by the parent's command line. Environment variables prove nothing: a shell may
    export the same ones.
    """
    try:
        parent = psutil.Process(os.getppid())
        command = parent.cmdline()
    except psutil.Error:
        return None
    if not command or not Path(command[0]).name.lower().startswith("python"):
        return None  # a shell, whose script may contain any word
    for place, word in enumerate(command):
        if Path(word).name in PROGRAMS or (command[place - 1] == "-m" and word.startswith(MODULES)):
            return Launcher(parent, tuple(command[place:]))
    return None


def seconds_since_launch() -> float:
    """Seconds since the launcher started, over all restarts; without one, since this process."""
    found = launcher()
    first = psutil.Process() if found is None else found.process
    return seconds_since_start(first)


def seconds_since_start(process: psutil.Process) -> float:
    """How long a process has existed. Raises psutil.NoSuchProcess if it may have ended.

    psutil adds the time since the boot to the time of the boot, which Linux gives in whole seconds.
    """
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # another system
        return time.time() - process.create_time()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), after the name
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
