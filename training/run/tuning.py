"""What a run does because of the device that computes it: the one way from a run into model/cpu/.

The last bits of a step depend on the kernel of attention, so it is the same on all processes and
kept in every snapshot. On a CPU it is products or torch's kernel, by a rule and not by measurement:
two new runs of one configuration have the same bits. On CUDA documents in a row have a kernel of
their own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from accelerate import Accelerator
from torch import nn

from config.schema import Config, ConfigError
from data.columns import PACKED
from model.attention import KERNELS, VARLEN
from model.cpu.layers import (
    KERNEL,
    MATMUL_ATTENTION_LENGTH,
    PRODUCTS,
    WAYS,
    attends_as_torch,
    tune,
)
from model.cpu.malloc import keep_freed_memory, use_one_heap
from model.cpu.threads import Threads, limit_threads
from model.family import Attend, LanguageModel
from snapshot.disk.state import ONE, RunState
from training.distributed.accelerator import cpu_has_bf16, is_compiled
from training.distributed.agreement import decided_by_main, run_on_all
from training.distributed.environment import on_cpu, processes_here

AUTO = "auto"


class Tuning:
    """The tuning for other devices does nothing. Every process calls the methods in order."""

    threads: Threads | None = None

    def tune(self, model: LanguageModel, state: RunState) -> None:
        """Choose the kernels of a model that is neither wrapped nor compiled yet."""

    def loaded(self, warn: Callable[[str], None]) -> None:
        """The weights are read. `warn` prints a sentence about the number of threads."""

    def watch(self, one_pass: Callable[[], object], flop_of_step: float) -> None:
        """Steps begin. `one_pass` is a forward and backward pass that changes nothing."""


class CpuTuning(Tuning):
    """Tunes a run on a CPU: heap and threads at once, kernels and freed memory later."""

    def __init__(self, accelerator: Accelerator, config: Config) -> None:
        self._accelerator, self._config = accelerator, config
        self._launched = torch.get_num_threads()
        use_one_heap()
        if config.run.adapt_threads:
            limit_threads(processes_here())

    def tune(self, model: LanguageModel, state: RunState) -> None:
        """Choose attention, which the run's state keeps, and replace layers by faster ones."""
        choose_attention(self._accelerator, self._config, model, state)
        tune(model, state.attention)

    def loaded(self, warn: Callable[[str], None]) -> None:
        """Keep freed memory from now on, because whole weights are sharded by now."""
        accelerator = self._accelerator
        keep_freed_memory(accelerator.is_fsdp2)
        alone = accelerator.num_processes == 1 and not is_compiled(accelerator)
        self.threads = Threads(
            passes=accelerator.gradient_accumulation_steps,
            adapt=self._config.run.adapt_threads and alone,
            launched=self._launched,
            warn=warn,
        )

    def watch(self, one_pass: Callable[[], object], flop_of_step: float) -> None:
        """Measure the number of threads now, and again if steps become slower."""
        assert self.threads is not None
        self.threads.watch(one_pass, flop_of_step)


class CudaTuning(Tuning):
    """Chooses the kernel of attention of a run on CUDA."""

    def __init__(self, accelerator: Accelerator, config: Config) -> None:
        self._accelerator, self._config = accelerator, config
        self._active = ExitStack()  # as long as the run

    def tune(self, model: LanguageModel, state: RunState) -> None:
        """Use the kernel of the run's state. Raises ConfigError if it cannot compute the model."""
        accelerator, config, sizes = self._accelerator, self._config, model.config
        head_size = sizes.attention_width // max(1, sizes.n_head)
        if config.run.attention != AUTO:
            state.attention = config.run.attention
        elif not is_exact(state.attention):
            state.attention = None  # only as long as the key asks for it
        elif state.attention is None and state.step == 0 and has_packed_rows(config, model, state):
            reason = why_no_kernel(accelerator, config, VARLEN, head_size)
            if decided_by_main(accelerator, lambda: reason is None):
                state.attention = VARLEN
        if (name := state.attention) is None or name in WAYS:
            return
        run_on_all(accelerator, lambda: refuse_kernel(accelerator, config, name, head_size))
        self._active.enter_context(KERNELS[name].active())
        if KERNELS[name].takes_documents:
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


def is_exact(attention: str | None) -> bool:
    """Whether the kernel that `run.attention` names adds up in one order."""
    return attention not in KERNELS or KERNELS[attention].is_exact


def tuning_for(accelerator: Accelerator, config: Config) -> Tuning:
    """The tuning of a run, before its first computation.

    Every process must call this. Raises ConfigError for a kernel that this run cannot use.
    """
    if config.run.attention in KERNELS:
        run_on_all(accelerator, lambda: refuse_kernel(accelerator, config, config.run.attention))
    if on_cpu():
        return CpuTuning(accelerator, config)
    return CudaTuning(accelerator, config) if accelerator.device.type == "cuda" else Tuning()


def choose_attention(
    accelerator: Accelerator, config: Config, model: nn.Module, state: RunState
) -> None:
    """Set `state.attention` to products or kernel. Every process must call this.

    It stays None for a model of transformers, for sequences that are too long for products, and
    for a run that resumes from a snapshot of an older version.
    """
    if not any(isinstance(module, Attend) for module in model.modules()):
        return
    if config.run.attention != AUTO:
        state.attention = config.run.attention
    elif (
        state.attention is None
        and state.step == 0
        and config.data.block_size <= MATMUL_ATTENTION_LENGTH
    ):
        # Of machines with different processors the main process's decides.
        state.attention = decided_by_main(
            accelerator, lambda: usually_faster(accelerator.mixed_precision)
        )
    if not attends_as_torch():
        if state.attention == PRODUCTS:
            raise ConfigError(
                "run.attention=products cannot be used, or the run began with it: Attend in "
                "model/family.py no longer computes torch's attention, as products do. Set "
                "run.attention=kernel."
            )
        state.attention = KERNEL


def usually_faster(precision: str) -> str:
    """Products, except where `Attend` was changed, and in bf16 on a CPU that emulates it.

    There the kernel is 1.6 to 6.6 times as fast (RESULTS.md, "Attention without AVX-512").
    """
    is_emulated = precision == "bf16" and not cpu_has_bf16()
    return KERNEL if is_emulated or not attends_as_torch() else PRODUCTS
