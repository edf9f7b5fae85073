"""The launcher that started this process, and what it and the system provide.

Only this file reads environment variables.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
import torch

from model.fp8 import TENSORWISE

WORKERS_VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
)
"""What a launcher sets for each of its workers."""
SHARDING_VARIABLES = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG")
SHARDING_PREFIXES = ("FSDP_", "PARALLELISM_CONFIG_")
"""What `accelerate launch` sets for several processes that share a model."""
PROGRAMS = {"accelerate", "accelerate-launch", "torchrun"}
MODULES = ("accelerate.commands.", "torch.")
"""Prefixes of the modules that `python -m` runs as a launcher."""


def env_var(name: str, default: str = "") -> str:
    """An environment variable, such as those that `accelerate launch` sets from its config file."""
    return os.environ.get(name, default)


def is_on(name: str) -> bool:
    """Whether a variable is true, in the words that accelerate accepts."""
    return env_var(name, "false").lower() in ("y", "yes", "t", "true", "on", "1")


def requested_precision() -> str:
    """The accelerate config file's `mixed_precision`."""
    return env_var("ACCELERATE_MIXED_PRECISION", "no").lower()


def fp8_recipe() -> str | None:
    """torchao's recipe for `mixed_precision: fp8`, None in other precisions.

    It is the entry `recipe_name` of the accelerate config file's `fp8_config`. accelerate 1.15
    passes that on and has no such option itself: its own recipe is the default.
    """
    if requested_precision() != "fp8":
        return None
    return env_var("ACCELERATE_FP8_RECIPE_NAME", TENSORWISE).lower()


def fsdp_requested() -> bool:
    """Whether the accelerate config file says `distributed_type: FSDP`."""
    return is_on("ACCELERATE_USE_FSDP")


def launched() -> bool:
    """Whether a launcher started this process, perhaps as one of several."""
    return "WORLD_SIZE" in os.environ


def started_processes() -> int:
    """How many processes the launcher started, on all machines."""
    return int(env_var("WORLD_SIZE", "1"))


def processes_here() -> int:
    """How many processes the launcher started on this machine."""
    return int(env_var("LOCAL_WORLD_SIZE", "1"))


def is_one_machine() -> bool:
    """Whether all processes of the run are on this machine."""
    return started_processes() == processes_here()


def machine_number() -> int:
    """The number that the launcher gave this machine, counted from 0."""
    return int(env_var("GROUP_RANK", "0"))


def is_local_main_process() -> bool:
    """Whether this is the first process of its machine."""
    return env_var("LOCAL_RANK", "0") == "0"


def is_main_process() -> bool:
    """Whether this is the main process."""
    return env_var("RANK", "0") == "0"


def restarts_left() -> int:
    """How often the launcher would still restart the processes after a failure."""
    most, done = (
        env_var("TORCHELASTIC_MAX_RESTARTS", "0"),
        env_var("TORCHELASTIC_RESTART_COUNT", "0"),
    )
    return int(most) - int(done)


def asked_machines() -> str:
    """torchrun's `--nnodes`, which accelerate takes from PET_NNODES only: '4', '1:4', or empty."""
    found = launcher()
    words = () if found is None or not launched() else found.command
    for place, word in enumerate(words):
        name, has_value, value = word.partition("=")
        if name == "--nnodes":
            return value if has_value else words[place + 1]
    return env_var("PET_NNODES") if launched() else ""


def shutdown_timeout() -> float:
    """Seconds from a signal until the launcher kills its processes; infinite without one."""
    return float(env_var("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")) if launched() else float("inf")


def on_cpu() -> bool:
    """Whether this process computes on the CPU: there is no GPU, or the config file says so.

    The launcher passes `use_cpu` only to a single process. To hide GPUs from several processes, a
    config file needs `gpu_ids`, as accelerate_configs/ddp_cpu.yaml has it.
    """
    return is_on("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()


DRAWING = {"MPLBACKEND": "agg"}
"""The import of matplotlib fails where this names a backend that is not installed, such as that of
a notebook, which it names to all programs that it starts."""


def draw_into_files() -> None:
    """Have matplotlib import without a display."""
    os.environ |= DRAWING


def silence_profiler() -> None:
    """Keep the progress lines of torch's profiler (USDT:..., STAGE:...) off the terminal.

    Its C++ logger reads the level at the first profile, and no Python call sets it. A level that
    the user has set stays.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def for_attempt(port: int, alone: bool, in_float32: bool) -> dict[str, str]:
    """The environment of a process that does this worker's part of another attempt.

    Its processes meet at `port` of the first machine. `alone`, it is the only one of them, and
    has the whole model. With `in_float32` it computes in that, whatever the config file says.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TORCHELASTIC_")  # their launcher is another one
    }
    if launched():
        kept["MASTER_PORT"] = str(port)
    if alone:
        others = (*WORKERS_VARIABLES, *SHARDING_VARIABLES)
        kept = {
            name: value
            for name, value in kept.items()
            if name not in others and not name.startswith(SHARDING_PREFIXES)
        }
    if in_float32:
        kept["ACCELERATE_MIXED_PRECISION"] = "no"
    return kept


def for_helpers(root: Path) -> dict[str, str]:
    """Variables for the processes of `multiprocessing` that serve this program in `root`.

    They import from there, and not what a current folder has under the same name (seen with the
    fork server of Python 3.11, which ignores sys.path). Semaphores of killed processes are removed
    without a warning.
    """
    quiet = "ignore::UserWarning:multiprocessing.resource_tracker"
    return {
        "PYTHONSAFEPATH": "1",
        **DRAWING,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(root), env_var("PYTHONPATH", "")))),
        "PYTHONWARNINGS": ",".join(filter(None, (env_var("PYTHONWARNINGS", ""), quiet))),
    }


def replace_environment(variables: Mapping[str, str]) -> None:
    """Give this process another environment."""
    os.environ.clear()
    os.environ.update(variables)


@contextmanager
def changed_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """The environment with other variables, as long as a block runs."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        replace_environment(before)


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
