"""What the launcher and the system provide: the only file that reads environment variables."""

from __future__ import annotations

import os
from pathlib import Path

import torch

WORKERS_VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
)
"""What a launcher sets for each of its workers."""


def env_var(name: str, default: str = "") -> str:
    """An environment variable, such as those that `accelerate launch` sets from its config file."""
    return os.environ.get(name, default)


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
    """How many processes the launcher started, on all machines."""
    return int(env_var("WORLD_SIZE", "1"))


def processes_here() -> int:
    """How many processes the launcher started on this machine."""
    return int(env_var("LOCAL_WORLD_SIZE", "1"))


def machine_number() -> int:
    """The number that the launcher gave this machine, counted from 0."""
    return int(env_var("GROUP_RANK", "0"))


def is_local_main_process() -> bool:
    """Whether this is the first process of its machine."""
    return env_var("LOCAL_RANK", "0") == "0"


def restarted_by_launcher() -> bool:
    """Whether `accelerate launch --max_restarts` restarted this process."""
    return int(env_var("TORCHELASTIC_RESTART_COUNT", "0")) > 0


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


def shutdown_timeout() -> float:
    """Seconds from a signal until the launcher kills its processes; infinite without one."""
    return float(env_var("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")) if launched() else float("inf")


def on_cpu() -> bool:
    """Whether this process computes on the CPU: there is no GPU, or the config file says so.

    The launcher passes `use_cpu` only to a single process. To hide GPUs from several processes, a
    config file needs `gpu_ids`, as accelerate_configs/ddp_cpu.yaml has it.
    """
    return is_on("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()


def silence_profiler() -> None:
    """Keep the progress lines of torch's profiler (USDT:..., STAGE:...) off the terminal.

    Its C++ logger reads the level at the first profile, and no Python call sets it. A level that
    the user has set stays.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def without_launcher(root: Path) -> dict[str, str]:
    """The environment for a process that is no worker of the launcher, with modules of `root`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in WORKERS_VARIABLES and not name.startswith(("ACCELERATE_", "TORCHELASTIC_"))
    }
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(root), kept.get("PYTHONPATH")))),
    }
