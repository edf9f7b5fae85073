"""Starts the processes of a run as the accelerate config file requests, or refuses.

accelerate silently ignores some requests: FSDP and fp16 on a CPU, processes that do not see each
other. This file and `precision.py` correct that.
"""

from __future__ import annotations

from datetime import timedelta

from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from config.schema import ConfigError
from training.distributed.environment import fsdp_requested, on_cpu, started_processes
from training.distributed.refusals import CONFIG_FILE, refusals
from training.distributed.rendezvous import fresh_store


def init_processes(timeout: timedelta) -> None:
    """Refuse what cannot be honoured, and connect the processes, also for FSDP on CPUs.

    Call this before the Accelerator is created. `timeout` limits the wait for the other processes.
    Raises ConfigError that names the entry of the accelerate config file.
    """
    refused = refusals()
    if refused:
        raise ConfigError("\n".join(refused))
    if started_processes() == 1:
        return
    store, rank, processes = fresh_store(timeout)
    state = PartialState(
        # The launcher does not pass use_cpu to several processes.
        cpu=on_cpu(),
        store=store,
        rank=rank,
        world_size=processes,
        timeout=timeout,
    )
    if fsdp_requested() and on_cpu():
        # accelerate promotes only MULTI_GPU to FSDP and calls processes on CPUs MULTI_CPU. What
        # follows is torch's FSDP2 over gloo.
        state.distributed_type = DistributedType.MULTI_GPU


def refuse_broken_launch(accelerator: Accelerator) -> None:
    """Raise ConfigError when the launcher's processes are not what its config file requests.

    Such processes do not see each other: each would train alone and write the same run.
    """
    started = started_processes()
    if started != accelerator.num_processes:
        raise ConfigError(
            f"the launcher started {started} processes, but each sees "
            f"{accelerator.num_processes}. On a machine without GPUs the accelerate config file "
            "needs 'use_cpu: true', as accelerate_configs/ddp_cpu.yaml has it."
        )
    if fsdp_requested() and accelerator.distributed_type != DistributedType.FSDP:
        raise ConfigError(
            f"{CONFIG_FILE} says distributed_type: FSDP with num_processes: {started}. One process "
            "has nothing to shard: use accelerate_configs/cpu.yaml or single_gpu.yaml."
        )
