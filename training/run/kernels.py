"""What a run does because of the device that computes it: threads, and kernels of attention.

The last bits of a step depend on the kernel of attention, so it is the same on all processes and
kept in every snapshot. On a CPU it is products or torch's kernel, by a rule and not by measurement:
two new runs of one configuration have the same bits. On CUDA documents in a row have a kernel of
their own.
"""

from __future__ import annotations

from accelerate import Accelerator

from config.schema import Config, ConfigError
from data.columns import PACKED
from model.attention import (
    CPU_WAYS,
    KERNELS,
    LONGEST_PRODUCTS,
    PRODUCTS,
    VARLEN,
    Attend,
    use_on_cpu,
)
from model.cpu import limit_threads
from model.family import LanguageModel
from snapshot.disk.state import ONE, RunState
from training.distributed.launcher import on_cpu, processes_here
from training.distributed.processes import decided_by_main, run_on_all

AUTO = "auto"


def fit_threads() -> None:
    """Use at most one thread for each core, where a CPU computes the steps.

    This comes before the first computation. Threads that share a core wait for each other.
    """
    if on_cpu():
        limit_threads(processes_here())


def refuse_requested_kernel(accelerator: Accelerator, config: Config) -> None:
    """Raise ConfigError for a `run.attention` that this run cannot use. Every process calls it."""
    if config.run.attention in KERNELS:
        run_on_all(accelerator, lambda: refuse_kernel(accelerator, config, config.run.attention))


def choose_attention(
    accelerator: Accelerator, config: Config, model: LanguageModel, state: RunState
) -> None:
    """Set `state.attention`, and have a model that is not wrapped yet attend so.

    Every process must call this. Raises ConfigError for a kernel that cannot compute the model.
    """
    if on_cpu():
        _choose_on_cpu(config, model, state)
    elif accelerator.device.type == "cuda":
        _choose_on_cuda(accelerator, config, model, state)


def _choose_on_cpu(config: Config, model: LanguageModel, state: RunState) -> None:
    """Products, or what the run began with.

    `state.attention` stays None for a model of transformers, for sequences that are too long for
    products, and for a run that began on another device.
    """
    if not any(isinstance(module, Attend) for module in model.modules()):
        return
    is_new = state.attention is None and state.step == 0
    if config.run.attention != AUTO:
        state.attention = config.run.attention
    elif is_new and config.data.block_size <= LONGEST_PRODUCTS:
        state.attention = PRODUCTS
    use_on_cpu(model, state.attention)


def _choose_on_cuda(
    accelerator: Accelerator, config: Config, model: LanguageModel, state: RunState
) -> None:
    """The kernel that is asked for or that the run began with; varlen for documents in a row."""
    sizes = model.config
    head_size = sizes.attention_width // max(1, sizes.n_head)
    if config.run.attention != AUTO:
        state.attention = config.run.attention
    elif state.attention is None and state.step == 0 and has_packed_rows(config, model, state):
        reason = why_no_kernel(accelerator, config, VARLEN, head_size)
        if decided_by_main(accelerator, lambda: reason is None):
            state.attention = VARLEN
    if (name := state.attention) is None or name in CPU_WAYS:
        return
    run_on_all(accelerator, lambda: refuse_kernel(accelerator, config, name, head_size))
    KERNELS[name].activate()
    model.use_varlen()


def has_packed_rows(config: Config, model: LanguageModel, state: RunState) -> bool:
    """Whether rows hold several documents that do not attend to each other."""
    return config.data.documents != PACKED and model.can_pack and state.rows != ONE


def why_no_kernel(
    accelerator: Accelerator, config: Config, name: str, head_size: int | None = None
) -> str | None:
    """Why the run or its machine cannot use a kernel of `KERNELS`: the end of a sentence."""
    if (kernel := KERNELS.get(name)) is None:  # those of a CPU, or torch's own
        return None
    reason = kernel.why_not_here(accelerator.device)
    reason = reason or kernel.why_not(accelerator.mixed_precision, config.model.dropout)
    return reason or (None if head_size is None else kernel.why_not_for(head_size))


def refuse_kernel(
    accelerator: Accelerator, config: Config, name: str, head_size: int | None = None
) -> None:
    """Raise ConfigError if the run or its machine cannot use a kernel of `KERNELS`."""
    if (reason := why_no_kernel(accelerator, config, name, head_size)) is not None:
        began = "" if config.run.attention == name else ", with which the run began,"
        raise ConfigError(f"run.attention={name}{began} {reason}.")
