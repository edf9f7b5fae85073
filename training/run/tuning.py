"""What a run does only because a CPU computes it: the one way from a run into model/cpu/."""

from __future__ import annotations

from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch import nn

from config.schema import Config
from model.cpu.malloc import keep_freed_memory, use_one_heap
from model.cpu.threads import Threads, limit_threads
from model.cpu.tune import tune
from snapshot.disk.state import RunState
from training.distributed.environment import on_cpu, processes_here
from training.distributed.strategy import is_compiled
from training.run.attention import choose_attention


class Tuning:
    """Nothing, for a run on another device. Every process calls the methods in their order."""

    threads: Threads | None = None

    def tune(self, model: nn.Module, state: RunState) -> None:
        """Choose the kernels of a model that is neither wrapped nor compiled yet."""

    def loaded(self, warn: Callable[[str], None]) -> None:
        """The weights are read. `warn` prints a sentence about the number of threads."""

    def watch(self, one_pass: Callable[[], object], flop_of_step: float) -> None:
        """Steps begin. `one_pass` is a forward and backward pass that changes nothing."""


class CpuTuning(Tuning):
    """For a run on a CPU: its heap and its threads from here on, later kernels and pages."""

    def __init__(self, accelerator: Accelerator, config: Config) -> None:
        self._accelerator, self._config = accelerator, config
        self._launched = torch.get_num_threads()
        use_one_heap()
        if config.run.adapt_threads:
            limit_threads(processes_here())

    def tune(self, model: nn.Module, state: RunState) -> None:
        """As above; the way of attention is kept in the run's state."""
        choose_attention(self._accelerator, self._config, model, state)
        tune(model, state.attention)

    def loaded(self, warn: Callable[[str], None]) -> None:
        """As above. What steps free is kept from here on: whole weights are sharded by now."""
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
        """As above: the number of threads is measured now, and when the pace falls."""
        assert self.threads is not None
        self.threads.watch(one_pass, flop_of_step)


def tuning_for(accelerator: Accelerator, config: Config) -> Tuning:
    """The tuning of a run, before its first computation."""
    return CpuTuning(accelerator, config) if on_cpu() else Tuning()
