"""What the launcher and the system say: the one place that looks at the environment."""

from __future__ import annotations

import os

import torch


def env_var(name: str, default: str = "") -> str:
    """A value that `accelerate launch` hands on from its config file."""
    return os.environ.get(name, default)


def is_on(name: str) -> bool:
    """A value of true or false, in the words that accelerate takes."""
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


def is_local_main_process() -> bool:
    """Whether this is the process that speaks for its machine."""
    return env_var("LOCAL_RANK", "0") == "0"


def restarted_by_launcher() -> bool:
    """Whether this is a restart by `accelerate launch --max_restarts`, not a person's start."""
    return int(env_var("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def is_main_process() -> bool:
    """Whether this is the main process."""
    return env_var("RANK", "0") == "0"


def restarts_left() -> int:
    """How often the launcher would start the processes again, if one of them failed now."""
    most, done = (
        env_var("TORCHELASTIC_MAX_RESTARTS", "0"),
        env_var("TORCHELASTIC_RESTART_COUNT", "0"),
    )
    return int(most) - int(done)


def shutdown_timeout() -> float:
    """Seconds after a signal in which the launcher kills its processes; infinite without one."""
    return float(env_var("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")) if launched() else float("inf")


def on_cpu() -> bool:
    """Whether this process computes on the CPU: there is no GPU, or its config file says so.

    Which the launcher tells a process that is the only one; to hide GPUs from several, a config
    file needs `gpu_ids`, as accelerate_configs/ddp_cpu.yaml has it.
    """
    return is_on("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()


def cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on every system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
