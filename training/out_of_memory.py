"""Too little memory: a sentence before the model is created, or for the error of a step."""

from __future__ import annotations

import errno
import re

import torch
from accelerate import Accelerator

from config.schema import ConfigError
from model.gpt import GPTConfig
from optim.optimizers import moments_of
from training.distributed.agreement import run_on_all
from training.distributed.environment import (
    fsdp_requested,
    on_cpu,
    processes_here,
    started_processes,
)
from training.exits import OutOfMemory
from training.memory import memory_left

FAILURES = re.compile(
    r"out of memory|not enough memory|allocate memory|ALLOC_FAILED|Storage size calculation overfl",
    re.IGNORECASE,
)
"""Texts of torch's allocators, CUDA's libraries and the system, in errors of no special type."""
REQUESTED = re.compile(r"allocate ([\d.]+ (?:bytes|[KMGTP]i?B))")
FLOAT_BYTES = 4
PLAN = "`python plan.py` with the same arguments and --memory shows what fits."
SMALLER = (
    f"{PLAN} Lower train.micro_batch_size, set model.activation_checkpointing=true, or lower "
    "data.block_size, model.n_layer or model.n_embd."
)


def check_fits(accelerator: Accelerator, config: GPTConfig, optimizer: str) -> GPTConfig:
    """Return the sizes; raise ConfigError where a process needs more memory than its share.

    Every process must call this. Each creates the weights. On a CPU, weights, gradients and what
    the `optimizer` keeps of them stay in the same memory, of FSDP's processes a part each; most of
    it is of matrices. The system promises more memory than it has: later it would end the process
    without a message.
    """
    width, layers = config.n_embd, config.n_layer
    embedded = config.vocab_size + config.block_size + 2
    parameters = 12 * layers * width**2 + (13 * layers + embedded) * width
    what_needs = f"model.n_layer={layers} and model.n_embd={width} need"
    check_parameters_fit(accelerator, parameters, optimizer, what_needs)
    return config


def check_parameters_fit(
    accelerator: Accelerator, parameters: int, optimizer: str, what_needs: str, created: bool = True
) -> None:
    """`check_fits` by the number of parameters; `what_needs` begins the message.

    Every process must call this. Without `created`, no process creates the whole weights.
    """

    def check() -> None:
        kept = FLOAT_BYTES * (2 + moments_of(optimizer)) * parameters if on_cpu() else 0
        if fsdp_requested():
            kept //= started_processes()
        needed = max(kept, FLOAT_BYTES * parameters if created else 0)
        left = memory_left(torch.device("cpu"), with_swap=True)
        if needed > left:
            processes = processes_here()
            share = f", its share of {processes} processes," if processes > 1 else ""
            raise ConfigError(
                f"{what_needs} {needed / 1e9:,.1f} GB of this machine's memory for each process, "
                f"and {left / 1e9:,.1f} GB{share} are left, at any train.micro_batch_size. {PLAN}"
            )

    run_on_all(accelerator, check)  # nobody takes memory before all have looked how much is left


def in_words(error: Exception, begun: bool) -> Exception:
    """The error itself, or one with a sentence where the error means that memory is exhausted.

    The latter is a ConfigError before training has `begun` and OutOfMemory after. For a device it
    is always OutOfMemory: another program may not have freed the device's memory yet.
    """
    if not is_out_of_memory(error):
        return error
    requested = REQUESTED.search(str(error))
    more = f": {requested[1]} more were requested" if requested else ""
    if begun or isinstance(error, torch.OutOfMemoryError):
        sentence = f"there is not enough memory for a step{more}. The run can be resumed. {SMALLER}"
        problem: Exception = OutOfMemory(sentence)
    else:
        problem = ConfigError(f"there is not enough memory for this model{more}. {SMALLER}")
    problem.reported_here = True  # type: ignore[attr-defined]  # perhaps only this process lacks memory
    return problem


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that there is no more memory, of the machine or of a device."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        return FAILURES.search(str(error)) is not None
    return isinstance(error, MemoryError)
