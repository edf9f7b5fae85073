"""What of an accelerate config file is refused, by name: what would be passed over.

That is what would otherwise train something else than was asked for, without a word.
"""

from __future__ import annotations

from model.gpt import Block
from training.distributed.environment import (
    env_var,
    fsdp_requested,
    is_on,
    launched,
    on_cpu,
    requested_precision,
    started_processes,
)
from training.distributed.launcher import launch_options

BLOCK = Block.__name__
HERE = "The accelerate config file"


def _passed_over() -> list[str]:
    """A sentence for what `accelerate launch` was told and passes over without a word."""
    told = launch_options()
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


def refusals() -> list[str]:
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
    if requested_precision() == "fp8":
        found.append(f"{HERE} says mixed_precision: fp8. There are no, bf16 and fp16.")
    steps = env_var("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if steps not in ("1", "auto"):
        found.append(
            f"{HERE} says gradient_accumulation_steps: {steps}. Accumulation follows from "
            "train.global_batch_size and train.micro_batch_size: remove the entry."
        )
    if fsdp_requested():
        found += _refused_of_fsdp()
    elif is_on("ACCELERATE_USE_PARALLELISM_CONFIG"):
        found.append(
            f"{HERE} has a parallelism_config without distributed_type: FSDP. DDP needs none: "
            "remove it, or see accelerate_configs/fsdp_hybrid.yaml."
        )
    return found


def _refused_of_fsdp() -> list[str]:
    version = env_var("FSDP_VERSION", "1")
    if version != "2":
        return [
            f"{HERE} says fsdp_version: {version}. Version 1 flattens parameters, which no "
            "snapshot can carry: write fsdp_version: 2, as accelerate_configs/fsdp.yaml has it."
        ]
    found = []

    def need(holds: bool, entry: str, value: str, remedy: str) -> None:
        if not holds:
            found.append(f"{HERE} says {entry}: {value}. {remedy}")

    policy = env_var("FSDP_AUTO_WRAP_POLICY", "NO_WRAP")
    need(
        policy.upper() == "TRANSFORMER_BASED_WRAP",
        "fsdp_auto_wrap_policy",
        policy,
        "Only block by block is less than the whole model in memory at once: write "
        "TRANSFORMER_BASED_WRAP.",
    )
    wrapped = env_var("FSDP_TRANSFORMER_CLS_TO_WRAP", BLOCK)
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
    ignored = env_var("FSDP_IGNORED_MODULES", "None")
    need(
        ignored in ("None", ""),
        "fsdp_ignored_modules",
        ignored,
        "Nobody would add up the gradients of those modules: remove it.",
    )
    reshard = env_var("FSDP_RESHARD_AFTER_FORWARD", "true")
    need(
        reshard.lower() in ("true", "false"),
        "fsdp_reshard_after_forward",
        reshard,
        "Version 2 knows true (less memory) and false (less communication).",
    )
    strategy = env_var("FSDP_SHARDING_STRATEGY", "FULL_SHARD")
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
    prefetch = env_var("FSDP_BACKWARD_PREFETCH", "None")
    need(
        prefetch.upper() in ("NONE", "", "BACKWARD_PRE"),
        "fsdp_backward_prefetch",
        prefetch,
        "Version 2 always does BACKWARD_PRE: remove it.",
    )
    need(
        not (is_on("FSDP_OFFLOAD_PARAMS") and requested_precision() == "fp16") or on_cpu(),
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
        name: int(env_var(f"PARALLELISM_CONFIG_{name.upper()}", "1"))
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
