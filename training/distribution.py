"""What the accelerate config file asks for: honoured, or refused by name.

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

from model.gpt import GPT, Block
from training.config import ConfigError
from training.environment import (
    asked,
    asked_precision,
    fsdp_asked,
    is_on,
    launched,
    started_processes,
)
from training.launcher import told_to_accelerate
from training.peers import fresh_store

BLOCK = Block.__name__
HERE = "The accelerate config file"
REPLICATION = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
"""DDP, with gradients that lie in its buckets, which they are sent from: else they exist twice."""


def on_cpu() -> bool:
    """Whether this process computes on the CPU: there is no GPU, or its config file says so.

    Which the launcher tells a process that is the only one; to hide GPUs from several, a config
    file needs `gpu_ids`, as accelerate_configs/ddp_cpu.yaml has it.
    """
    return is_on("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()


def settle_launch(timeout: timedelta) -> None:
    """Refuse what cannot be honoured, and let the processes find each other, also for FSDP on CPUs.

    To be called before the Accelerator is made, with how long to wait for the others. Raises
    ConfigError that names the entry of the accelerate config file.
    """
    refused = _refused()
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
    if fsdp_asked() and on_cpu():
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
    if fsdp_asked() and accelerator.distributed_type != DistributedType.FSDP:
        raise ConfigError(
            f"{HERE} says distributed_type: FSDP with num_processes: {started}. One process has "
            "nothing to share; accelerate_configs/cpu.yaml and single_gpu.yaml are for one."
        )


def cpu_has_bf16() -> bool:
    """Whether the CPU has bf16 matrix instructions (AVX512-BF16, AMX or Arm's)."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def precision_here() -> str | None:
    """`mixed_precision` for the Accelerator: None, which is what its config file says, or "no".

    That is for bf16 on a CPU without the instructions: emulated, it takes up to 13 times as long.
    """
    emulated = on_cpu() and not (cpu_has_bf16() or is_on("EMULATE_BF16"))
    return "no" if asked_precision() == "bf16" and emulated else None


def settle_precision(accelerator: Accelerator, model: GPT) -> None:
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


def keeps_gradients(model: nn.Module) -> bool:
    """Whether gradients lie in DDP's buckets, which stay. Freed, they would be made beside them."""
    # Compiled whole, it is DDP that the compiler has wrapped.
    return any(isinstance(module, DistributedDataParallel) for module in model.modules())


def offloads(accelerator: Accelerator) -> bool:
    """Whether FSDP keeps weights, gradients and optimizer on the CPU."""
    return accelerator.is_fsdp2 and hasattr(accelerator.state.fsdp_plugin.cpu_offload, "pin_memory")


def _passed_over() -> list[str]:
    """A sentence for what `accelerate launch` was told and passes over without a word."""
    told = told_to_accelerate()
    if told is None:
        return []
    if not launched() and (told.processes > 1 or told.machines > 1):
        return [
            f"accelerate launch was told num_machines: {told.machines} and num_processes: "
            f"{told.processes}, but starts one process that trains alone ({told.kind}). For "
            "several write distributed_type: MULTI_GPU or FSDP, with use_cpu: true on CPUs, as "
            "accelerate_configs/ddp_cpu.yaml has it; for one --num_machines 1 --num_processes 1."
        ]
    several = launched() and told.gpu_ids == "all"
    wanted = several or any(name.strip().isdigit() for name in told.gpu_ids.split(","))
    if wanted and not told.use_cpu and not is_on("ACCELERATE_USE_CPU") and on_cpu():
        return [
            f"{HERE} asks for GPUs ({told.kind}, gpu_ids: {told.gpu_ids}), and torch finds none. "
            "Check the driver (nvidia-smi), and that torch is built for it. On CPUs take "
            "accelerate_configs/cpu.yaml, ddp_cpu.yaml or fsdp_cpu.yaml."
        ]
    return []


def _refused() -> list[str]:
    """A sentence for each entry of the accelerate config file that cannot be honoured."""
    found = _passed_over()
    for name, kind in (
        ("ACCELERATE_USE_DEEPSPEED", "DEEPSPEED"),
        ("ACCELERATE_USE_MEGATRON_LM", "MEGATRON_LM"),
        ("ACCELERATE_USE_SAGEMAKER", "SageMaker"),
    ):
        if is_on(name):
            found.append(
                f"{HERE} asks for {kind}, whose state no snapshot here can carry. Use "
                "distributed_type: MULTI_GPU (DDP) or FSDP."
            )
    if asked_precision() == "fp8":
        found.append(f"{HERE} says mixed_precision: fp8. There are no, bf16 and fp16.")
    steps = asked("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if steps not in ("1", "auto"):
        found.append(
            f"{HERE} says gradient_accumulation_steps: {steps}. Accumulation follows from "
            "train.global_batch_size and train.micro_batch_size: remove the entry."
        )
    if fsdp_asked():
        found += _refused_of_fsdp()
    elif is_on("ACCELERATE_USE_PARALLELISM_CONFIG"):
        found.append(
            f"{HERE} has a parallelism_config without distributed_type: FSDP. DDP needs none: "
            "remove it, or see accelerate_configs/fsdp_hybrid.yaml."
        )
    return found


def _refused_of_fsdp() -> list[str]:
    version = asked("FSDP_VERSION", "1")
    if version != "2":
        return [
            f"{HERE} says fsdp_version: {version}. Version 1 flattens parameters, which no "
            "snapshot can carry: write fsdp_version: 2, as accelerate_configs/fsdp.yaml has it."
        ]
    found = []

    def need(holds: bool, entry: str, value: str, remedy: str) -> None:
        if not holds:
            found.append(f"{HERE} says {entry}: {value}. {remedy}")

    policy = asked("FSDP_AUTO_WRAP_POLICY", "NO_WRAP")
    need(
        policy.upper() == "TRANSFORMER_BASED_WRAP",
        "fsdp_auto_wrap_policy",
        policy,
        "Only block by block is less than the whole model in memory at once: write "
        "TRANSFORMER_BASED_WRAP.",
    )
    wrapped = asked("FSDP_TRANSFORMER_CLS_TO_WRAP", BLOCK)
    need(
        wrapped == BLOCK,
        "fsdp_transformer_layer_cls_to_wrap",
        wrapped,
        f"This model's blocks are of the class {BLOCK}: write that.",
    )
    for entry in ("activation_checkpointing", "activation_checkpointing_offload"):
        need(
            not is_on(f"FSDP_{entry.upper()}"),
            f"fsdp_{entry}",
            "true",
            "accelerate's recomputes with another dropout, so that gradients are wrong: remove "
            "it, and give train.py model.activation_checkpointing=true.",
        )
    ignored = asked("FSDP_IGNORED_MODULES", "None")
    need(
        ignored in ("None", ""),
        "fsdp_ignored_modules",
        ignored,
        "Nobody would add up the gradients of those modules: remove it.",
    )
    reshard = asked("FSDP_RESHARD_AFTER_FORWARD", "true")
    need(
        reshard.lower() in ("true", "false"),
        "fsdp_reshard_after_forward",
        reshard,
        "Version 2 knows true (less memory) and false (less communication).",
    )
    strategy = asked("FSDP_SHARDING_STRATEGY", "FULL_SHARD")
    need(
        strategy.upper() in ("FULL_SHARD", "1"),
        "fsdp_sharding_strategy",
        strategy,
        "It is version 1's and would be passed over. Version 2 has fsdp_reshard_after_forward and "
        "parallelism_config: see accelerate_configs/fsdp_hybrid.yaml.",
    )
    need(
        not is_on("FSDP_FORWARD_PREFETCH"),
        "fsdp_forward_prefetch",
        "true",
        "It is version 1's and would be passed over; version 2 prefetches by itself: remove it.",
    )
    prefetch = asked("FSDP_BACKWARD_PREFETCH", "None")
    need(
        prefetch.upper() in ("NONE", "", "BACKWARD_PRE"),
        "fsdp_backward_prefetch",
        prefetch,
        "Version 2 always does BACKWARD_PRE: remove it.",
    )
    need(
        not (is_on("FSDP_OFFLOAD_PARAMS") and asked_precision() == "fp16") or on_cpu(),
        "fsdp_offload_params",
        "true",
        "With mixed_precision: fp16, torch would scale gradients on the CPU by a number that may "
        "still be on its way from the GPU: write bf16 or no.",
    )
    if is_on("ACCELERATE_USE_PARALLELISM_CONFIG"):
        found += _refused_of_parallelism()
    return found


def _refused_of_parallelism() -> list[str]:
    sizes = {
        name: int(asked(f"PARALLELISM_CONFIG_{name.upper()}", "1"))
        for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
    }
    entry = "parallelism_config"
    found = [
        f"{HERE} says {entry}_{name}: {size}. Sequences and layers are not split here: write 1."
        for name, size in sizes.items()
        if name in ("tp_size", "cp_size", "sp_size") and size != 1
    ]
    replicate, shard = sizes["dp_replicate_size"], sizes["dp_shard_size"]
    if shard < 2:
        found.append(
            f"{HERE} says {entry}_dp_shard_size: {shard}. With one shard nothing is shared: write "
            "the number of GPUs in a machine, or use accelerate_configs/ddp.yaml."
        )
    elif replicate * shard != started_processes():
        found.append(
            f"{HERE} says {entry}_dp_replicate_size: {replicate} and {entry}_dp_shard_size: "
            f"{shard}, together {replicate * shard} processes, but {started_processes()} run. "
            "Their product must be num_processes."
        )
    return found
