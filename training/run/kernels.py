"""What a run does because of the device that computes it: threads, and kernels of attention.

The last bits of a step depend on the kernel of attention, so it is the same on all processes and
kept in every snapshot. On CUDA documents in a row have a kernel of their own.
"""

from __future__ import annotations

from accelerate import Accelerator

from config.schema import Config, ConfigError
from data.columns import PACKED
from model.cpu import limit_threads
from model.family import LanguageModel
from model.kernels import KERNEL, VARLEN, why_no_varlen
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
    if config.run.attention != AUTO:
        run_on_all(accelerator, lambda: refuse_kernel(accelerator, config, config.run.attention))


def choose_attention(
    accelerator: Accelerator, config: Config, model: LanguageModel, state: RunState
) -> None:
    """Set `state.attention`, and have a model that is not wrapped yet attend so.

    That is the one that is asked for or that the run began with; varlen for documents in a row.
    Only CUDA has several. Every process must call this. Raises ConfigError for a kernel that cannot
    compute the model.
    """
    if accelerator.device.type != "cuda":
        return
    asked, head_size = config.run.attention, model.config.head_width
    has_packed_rows = config.data.documents != PACKED and model.can_pack and state.rows != ONE
    if asked != AUTO:
        state.attention = asked
    elif state.attention is None and state.step == 0 and has_packed_rows:
        reason = why_no_kernel(accelerator, config, VARLEN, head_size)
        if decided_by_main(accelerator, lambda: reason is None):
            state.attention = VARLEN
    if state.attention == VARLEN:  # otherwise torch chooses
        run_on_all(accelerator, lambda: refuse_kernel(accelerator, config, VARLEN, head_size))
        model.use_varlen()


def why_no_kernel(
    accelerator: Accelerator, config: Config, name: str, head_size: int | None = None
) -> str | None:
    """Why the run or its machine cannot use this kernel: the end of a sentence."""
    if accelerator.device.type != "cuda":
        return f"runs on CUDA devices, and this run computes on {accelerator.device}. Leave it out"
    if name == KERNEL:
        return None
    precision, dropout = accelerator.mixed_precision, config.model.dropout
    return why_no_varlen(precision, dropout, head_size, accelerator.device)


def refuse_kernel(
    accelerator: Accelerator, config: Config, name: str, head_size: int | None = None
) -> None:
    """Raise ConfigError if the run or its machine cannot use this kernel."""
    if (reason := why_no_kernel(accelerator, config, name, head_size)) is not None:
        began = "" if config.run.attention == name else ", with which the run began,"
        raise ConfigError(f"run.attention={name}{began} {reason}.")
