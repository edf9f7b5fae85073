"""What the accelerate config file asks for, made true where accelerate does not.

accelerate itself passes over some of it in silence: FSDP and fp16 on a CPU, processes that do not
see each other, the precision of a sum of gradients. This is where that is mended.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    get_mixed_precision_context_manager,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from config.schema import ConfigError
from model.gpt import GPT
from training.distributed.environment import (
    fsdp_requested,
    is_on,
    on_cpu,
    requested_precision,
    started_processes,
)
from training.distributed.refusals import HERE, refusals
from training.distributed.timeouts import fresh_store

REPLICATION = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
"""DDP, with gradients that lie in its buckets, which they are sent from: else they exist twice."""


def init_processes(timeout: timedelta) -> None:
    """Refuse what cannot be honoured, and let the processes find each other, also for FSDP on CPUs.

    To be called before the Accelerator is made, with how long to wait for the others. Raises
    ConfigError that names the entry of the accelerate config file.
    """
    refused = refusals()
    if refused:
        raise ConfigError("\n".join(refused))
    if started_processes() == 1:
        return
    store, rank, processes = fresh_store(timeout)
    state = PartialState(
        # Said here, because the launcher does not hand use_cpu on to several processes.
        cpu=on_cpu(),
        store=store,
        rank=rank,
        world_size=processes,
        timeout=timeout,
    )
    if fsdp_requested() and on_cpu():
        # accelerate promotes MULTI_GPU to FSDP and nothing else, and calls processes on CPUs
        # MULTI_CPU. All that follows is FSDP2 over gloo, as torch has it.
        state.distributed_type = DistributedType.MULTI_GPU


def refuse_broken_launch(accelerator: Accelerator) -> None:
    """Raise ConfigError when the launcher's processes are not what its config file says.

    They then do not see each other: each would believe to be the only one and write the same run.
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
            f"{HERE} says distributed_type: FSDP with num_processes: {started}. One process has "
            "nothing to share; accelerate_configs/cpu.yaml and single_gpu.yaml are for one."
        )


def cpu_has_bf16() -> bool:
    """Whether the CPU has bf16 matrix instructions (AVX512-BF16, AMX or Arm's)."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def effective_precision() -> str | None:
    """`mixed_precision` for the Accelerator: None, which is what its config file says, or "no".

    That is for bf16 on a CPU without the instructions: emulated, it takes up to 13 times as long.
    """
    emulated = on_cpu() and not (cpu_has_bf16() or is_on("EMULATE_BF16"))
    return "no" if requested_precision() == "bf16" and emulated else None


def configure_precision(accelerator: Accelerator, model: GPT) -> None:
    """Make mixed precision mean the same under every strategy. To be called before `prepare`.

    Weights, gradients' sums, the residual stream and the loss are float32; matrix products are of
    the precision asked for; fp16 has a loss scaler.
    """
    precision = accelerator.mixed_precision
    if precision == "fp16" and accelerator.scaler is None:
        # accelerate trains in float32 on a CPU when fp16 is asked for, and does not say so.
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler(accelerator.device.type)
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin is not None and accelerator.device.type == "cpu" and offloads(accelerator):
        plugin.cpu_offload = replace(plugin.cpu_offload, pin_memory=False)
    if plugin is not None and precision != "no":
        plugin.mixed_precision_policy = in_mixed_precision(plugin.mixed_precision_policy)
        # Which accelerate does itself for all but FSDP2.
        autocast = get_mixed_precision_context_manager(True, accelerator.autocast_handler)
        model.forward = autocast(model.forward)  # type: ignore[method-assign]


def in_mixed_precision(policy: Any) -> Any:
    """FSDP's policy with weights of 16 bits where they are used, and sums of 32.

    As accelerate sets it, gradients are summed and the loss is returned in 8 or 11 bits.
    """
    return replace(policy, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False)


def grads_in_buckets(model: nn.Module) -> bool:
    """Whether gradients lie in DDP's buckets, which stay. Freed, they would be made beside them."""
    # Compiled whole, it is DDP that the compiler has wrapped.
    return any(isinstance(module, DistributedDataParallel) for module in model.modules())


def offloads(accelerator: Accelerator) -> bool:
    """Whether FSDP keeps weights, gradients and optimizer on the CPU."""
    return accelerator.is_fsdp2 and hasattr(accelerator.state.fsdp_plugin.cpu_offload, "pin_memory")
