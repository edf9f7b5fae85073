"""Settings of torch and malloc, made once per process before the first computation."""

from __future__ import annotations

import torch

from config.schema import RunConfig
from model.cores import limit_threads
from training.distributed.environment import on_cpu, processes_here
from training.memory import use_one_heap
from training.reproducibility import compute_reproducibly


def set_up_process(run: RunConfig) -> int:
    """Choose the kernels, the allocator and the number of threads of this process.

    Returns the launcher's number of threads.
    """
    compute_reproducibly()
    if on_cpu():
        use_one_heap()
    threads = torch.get_num_threads()
    if run.adapt_threads and on_cpu():
        limit_threads(processes_here())
    return threads
