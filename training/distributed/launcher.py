"""The launcher that started this process, and what its environment says.

Nothing else in a run reads environment variables.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
import torch

from model.cpu import limit_threads

PROGRAMS = {"accelerate", "accelerate-launch", "torchrun"}
MODULES = ("accelerate.commands.", "torch.")
"""Prefixes of the modules that `python -m` runs as a launcher."""


def env_var(name: str, default: str = "") -> str:
    """An environment variable, such as those that `accelerate launch` sets from its config file."""
    return os.environ.get(name, default)


def set_for_library(name: str, value: str) -> None:
    """Set what a library reads when it is loaded, and has no other option for."""
    os.environ[name] = value


def is_on(name: str) -> bool:
    """Whether a variable is true, in the words that accelerate accepts."""
    return env_var(name, "false").lower() in ("y", "yes", "t", "true", "on", "1")


def requested_precision() -> str:
    """The accelerate config file's `mixed_precision`."""
    return env_var("ACCELERATE_MIXED_PRECISION", "no").lower()


def fsdp_requested() -> bool:
    """Whether the accelerate config file says `distributed_type: FSDP`."""
    return is_on("ACCELERATE_USE_FSDP")


def launched() -> bool:
    """Whether a launcher started this process, perhaps as one of several."""
    return "WORLD_SIZE" in os.environ


def started_processes() -> int:
    """How many processes the launcher started, on all machines.

    A shell may export what a launcher set for another process: where this is 1, the rest is void.
    """
    return int(env_var("WORLD_SIZE") or 1)


def processes_here() -> int:
    """How many processes the launcher started on this machine."""
    return min(int(env_var("LOCAL_WORLD_SIZE") or 1), started_processes())


def is_one_machine() -> bool:
    """Whether all processes of the run are on this machine."""
    return started_processes() == processes_here()


def machine_number() -> int:
    """The number that the launcher gave this machine, counted from 0."""
    return int(env_var("GROUP_RANK", "0"))


def is_local_main_process() -> bool:
    """Whether this is the first process of its machine."""
    return started_processes() == 1 or env_var("LOCAL_RANK", "0") == "0"


def is_main_process() -> bool:
    """Whether this is the main process."""
    return started_processes() == 1 or env_var("RANK", "0") == "0"


def restarts_left() -> int:
    """How often the launcher would still restart the processes after a failure."""
    return int(env_var("TORCHELASTIC_MAX_RESTARTS", "0")) - restarts()


def restarts() -> int:
    """How often the launcher has restarted the processes after a failure."""
    return int(env_var("TORCHELASTIC_RESTART_COUNT", "0"))


def shutdown_timeout() -> float:
    """Seconds from a signal until the launcher kills its processes; infinite without one."""
    return float(env_var("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")) if launched() else float("inf")


def on_cpu() -> bool:
    """Whether this process computes on the CPU: there is no GPU, or the config file says so.

    The launcher passes `use_cpu` only to a single process. To hide GPUs from several processes, a
    config file needs `gpu_ids`, as accelerate_configs/ddp_cpu.yaml has it.
    """
    return is_on("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()


def fit_threads() -> None:
    """Use at most one thread for each core, where a CPU computes the steps.

    This comes before the first computation. Threads that share a core wait for each other.
    """
    if on_cpu():
        limit_threads(processes_here())


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


def seconds_since_start(process: psutil.Process | None = None) -> float:
    """How long a process has existed; by default this one."""
    created = float((process or psutil.Process()).create_time())
    if sys.platform == "linux":  # psutil knows the time of the boot in whole seconds, in both terms
        return time.clock_gettime(time.CLOCK_BOOTTIME) - (created - psutil.boot_time())
    return time.time() - created


def seconds_since_launch() -> float:
    """How long this attempt has lasted, with the earlier starts of a launcher that restarts it.

    A first start counts from its own process: a shell may have become the launcher much later than
    it began.
    """
    started_by = launcher() if restarts() else None
    return seconds_since_start(None if started_by is None else started_by.process)
