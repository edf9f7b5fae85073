"""How much memory a process may take, and the sentence for a run that needs more.

The check comes before the weights have values. A step that fails later is told from its error.
"""

from __future__ import annotations

import ctypes
import errno
import re
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator

from config.schema import ConfigError, OptimConfig
from model.cpu import control_groups
from model.family import LanguageModel
from optim.optimizers import OPTIMIZERS
from training.distributed.launcher import fsdp_requested, on_cpu, processes_here, started_processes
from training.distributed.processes import run_on_all
from training.exits import OutOfMemory

MEMORY_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Files of a control group, versions 2 and 1: its limit and its use."""
FILE_CACHE = ("active_file", "inactive_file")
"""Cached file pages, which the system can reclaim; version 1 also has them as total_..."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""
LARGEST_KEPT = 32 << 20
"""Bytes of an allocation: glibc maps a larger one, and returns it, in any case."""
FAILURES = re.compile(
    r"out of memory|not enough memory|allocate memory|ALLOC_FAILED|Storage size calculation overfl",
    re.IGNORECASE,
)
"""Messages of torch's allocators, CUDA's libraries and the system in errors of general types."""
PLAN = "`python plan.py` with the same arguments and --memory shows what fits."
SMALLER = (
    f"{PLAN} Lower train.micro_batch_size, set model.activation_checkpointing=true, or lower "
    "data.block_size, model.n_layer or model.n_embd."
)


def check_fits(
    accelerator: Accelerator, model: LanguageModel, optim: OptimConfig, key: str | None = None
) -> None:
    """Raise ConfigError where a process on a CPU needs more memory than its share.

    Every process must call this. Weights, gradients and optimizer state take its memory, and FSDP's
    processes keep a shard of all of them. The check comes before the weights of the `model` have
    values, because the system promises more memory than it has, and later kills the process
    silently. `key` is the key and value that chose another model than our GPT.
    """
    if not on_cpu():
        return
    of_trained = 2 + OPTIMIZERS[optim.name].moments  # times the bytes of its weight
    needed = sum(
        parameter.nbytes * (of_trained if parameter.requires_grad else 1)
        for parameter in model.parameters()
    )
    needed = int(needed) // (started_processes() if fsdp_requested() else 1)

    def check() -> None:
        left = memory_left(with_swap=True)
        if needed > left:
            sizes, processes = model.config, processes_here()
            chosen = f"model.n_layer={sizes.n_layer} and model.n_embd={sizes.n_embd} need"
            share = f", its share of {processes} processes," if processes > 1 else ""
            raise ConfigError(
                f"{chosen if key is None else f'{key} needs'} {needed / 1e9:,.1f} GB of this "
                f"machine's memory for each process, and {left / 1e9:,.1f} GB{share} are left, at "
                f"any train.micro_batch_size. {PLAN}"
            )

    run_on_all(accelerator, check)  # nobody takes memory before all have looked how much is left


def keep_freed_memory() -> None:
    """On a CPU, have glibc keep what a step frees for the next: 2 to 4 % went to page faults.

    Not under FSDP, which is there to save memory. Another C library is left alone. Call it when
    what only a start needs is freed.
    """
    if sys.platform != "linux" or fsdp_requested() or not on_cpu():
        return
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(M_TRIM_THRESHOLD, -1)  # never


def in_words(error: Exception, begun: bool) -> Exception:
    """The error itself, or one with a sentence in its place if memory is exhausted.

    That is a ConfigError before training has `begun`, and OutOfMemory later. On a device it is
    always OutOfMemory, because another program may not have freed the device yet.
    """
    if not is_out_of_memory(error):
        return error
    problem: Exception = ConfigError(f"there is not enough memory for this model. {SMALLER}")
    if begun or isinstance(error, torch.OutOfMemoryError):
        sentence = "there is not enough memory for a step. The run can be resumed."
        problem = OutOfMemory(f"{sentence} {SMALLER}")
    problem.reported_here = True  # type: ignore[attr-defined]  # perhaps only this process lacks memory
    return problem


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that there is no more memory, of the machine or of a device."""
    if isinstance(error, RuntimeError):
        return FAILURES.search(str(error)) is not None
    lacks = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return lacks or isinstance(error, MemoryError)


def memory_left(with_swap: bool = False) -> int:
    """Bytes that this process may still take of this machine, which its processes share equally."""
    return available_memory(with_swap) // processes_here()


def available_memory(with_swap: bool = False, root: Path = Path("/")) -> int:
    """Bytes that the processes of this machine can still allocate, within their control groups.

    The system kills a container or a Slurm job that exceeds its control group's limit, even when
    the machine has memory left. psutil only knows the machine.
    """
    left = [psutil.virtual_memory().available]
    if with_swap:
        left[0] += psutil.swap_memory().free
    for group in control_groups("memory", root):
        for limit, use in MEMORY_FILES:
            # A file is missing in the other version, and a limit may be "max".
            with suppress(OSError, ValueError):
                most, used = (int((group / name).read_text()) for name in (limit, use))
                lines = (group / "memory.stat").read_text().splitlines()
                facts = dict(line.split() for line in lines)
                cache = (int(facts.get(f"total_{name}", facts.get(name, 0))) for name in FILE_CACHE)
                left.append(most - used + sum(cache))
    return min(left)
