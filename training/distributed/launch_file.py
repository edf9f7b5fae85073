"""Entries of the accelerate config file, and launches, that are refused by name.

Otherwise accelerate or torch would ignore them silently and train something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser

from training.distributed.launcher import (
    env_var,
    fsdp_requested,
    is_on,
    launched,
    launcher,
    on_cpu,
    processes_here,
    requested_precision,
    started_processes,
)

CONFIG_FILE = "The accelerate config file"
OF_EACH_PROCESS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
OFF = "FALSE F NO N OFF 0"
ENTRIES = {
    "ACCELERATE_USE_DEEPSPEED": (
        OFF,
        "The optimizer state of distributed_type: DEEPSPEED fits no other shape. distributed_type: "
        "FSDP shards as ZeRO stage 3 does: docs/parallelism.md has its entries.",
    ),
    "ACCELERATE_USE_MEGATRON_LM": (
        OFF,
        "MEGATRON_LM has models and a loop of its own. Use distributed_type: FSDP with "
        "parallelism_config_tp_size for its tensor parallelism and parallelism_config_cp_size for "
        "long sequences.",
    ),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        "1 AUTO",
        "Accumulation follows from train.global_batch_size and train.micro_batch_size: remove the "
        "entry.",
    ),
    "ACCELERATE_FP8_BACKEND": ("AO NO", "Only torchao is supported: set AO."),
    "ACCELERATE_FP8_RECIPE_NAME": ("TENSORWISE", "Scales are of whole tensors: set tensorwise."),
    "FSDP_VERSION": (
        "2",
        "Version 1 flattens parameters, which a snapshot cannot hold: set fsdp_version: 2, as in "
        "accelerate_configs/fsdp.yaml.",
    ),
    "FSDP_AUTO_WRAP_POLICY": (
        "TRANSFORMER_BASED_WRAP",
        "Only wrapping block by block keeps the whole model out of memory: set "
        "TRANSFORMER_BASED_WRAP.",
    ),
    "FSDP_ACTIVATION_CHECKPOINTING": (
        OFF,
        "It recomputes with different dropout masks, so gradients would be wrong. Remove it, and "
        "pass model.activation_checkpointing=true to train.py.",
    ),
    "FSDP_IGNORED_MODULES": (
        "NONE",
        "The gradients of those modules would not be reduced over processes. Remove it.",
    ),
    "FSDP_RESHARD_AFTER_FORWARD": (
        "TRUE FALSE",
        "Version 2 takes true (less memory) or false (less communication).",
    ),
    "FSDP_SHARDING_STRATEGY": (
        "FULL_SHARD 1",
        "It belongs to version 1 and would be ignored. Version 2 has fsdp_reshard_after_forward "
        "and parallelism_config: see accelerate_configs/fsdp_hybrid.yaml.",
    ),
    "PARALLELISM_CONFIG_SP_SIZE": (
        "1",
        "DeepSpeed's sequence parallelism is not supported: set it to 1. "
        "parallelism_config_cp_size shares sequences.",
    ),
}
"""By variable, the values that are honoured, in capitals, and what to do about others."""
UNSET = {"FSDP_VERSION": "1", "FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}
"""What accelerate takes for a variable that is not set, if that is not right."""


def refusals() -> list[str]:
    """A sentence for each entry of the accelerate config file that cannot be honoured."""
    sentences = [*_left_over(), *_ignored_by_launcher(), *_too_few_gpus()]
    for variable, (right, remedy) in ENTRIES.items():
        if variable.startswith(("FSDP_", "PARALLELISM_")) and not fsdp_requested():
            continue
        value = env_var(variable) or UNSET.get(variable, "")
        if value and value.upper() not in right.split():
            name = variable.lower().removeprefix("accelerate_").replace("fp8_", "fp8_config ")
            sentences.append(f"{CONFIG_FILE} says {name}: {value}. {remedy}")
    if (
        requested_precision() == "fp8"
        and not on_cpu()  # which emulates it; accelerate would compute in fp16 on such a GPU
        and not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9))
    ):
        sentences.append(
            f"{CONFIG_FILE} says mixed_precision: fp8, which needs an NVIDIA GPU of compute "
            "capability 8.9 (Ada, Hopper) or later: set mixed_precision: bf16."
        )
    if is_on("FSDP_OFFLOAD_PARAMS") and requested_precision() == "fp16" and not on_cpu():
        sentences.append(
            f"{CONFIG_FILE} says fsdp_offload_params: true. With mixed_precision: fp16, gradients "
            "on the CPU may be scaled before the scale has arrived from the GPU. Set "
            "mixed_precision to bf16 or no."
        )
    if is_on("ACCELERATE_USE_PARALLELISM_CONFIG"):
        sentences += _wrong_sizes()
    if fsdp_requested() and started_processes() == 1 and not sentences:
        sentences.append(
            f"{CONFIG_FILE} says distributed_type: FSDP with num_processes: 1. One process has "
            "nothing to shard: use accelerate_configs/cpu.yaml or single_gpu.yaml."
        )
    return sentences


def _left_over() -> Iterator[str]:
    """A sentence if the environment names several processes, and less than their launcher sets."""
    values = {name: env_var(name) for name in OF_EACH_PROCESS}
    missing = [name for name, value in values.items() if not value]
    # accelerate takes a process with LOCAL_RANK for one of several, and no empty WORLD_SIZE.
    is_one_of_several = started_processes() > 1 or values["LOCAL_RANK"]
    if missing and (is_one_of_several or not env_var("WORLD_SIZE", "1")):
        given = [f"{name}={value}" for name, value in values.items() if value] or ["WORLD_SIZE="]
        yield (
            f"the environment has {' and '.join(given)}, as for one of several processes, but no "
            f"{' and no '.join(missing)}. For one process, unset {' '.join(OF_EACH_PROCESS)}; for "
            "several, start train.py with `accelerate launch`."
        )


def _ignored_by_launcher() -> Iterator[str]:
    """A sentence for processes or GPUs that `accelerate launch` silently does without.

    Without a distributed_type it starts one process; without GPUs it trains on the CPU. Nothing
    for another launcher.
    """
    started_by = launcher()
    if started_by is None or "accelerate" not in Path(started_by.command[0]).name:
        return
    words = list(started_by.command[1:])
    file = None
    try:
        options = launch_command_parser().parse_args(words[words[:1] == ["launch"] :])
        if options.config_file or (Path(default_config_file).is_file() and not options.cpu):
            file = load_config_from_file(options.config_file)
    except (SystemExit, OSError, ValueError):  # accelerate reports it
        return
    counts = {
        name: int(getattr(options, name) or getattr(file, name, None) or 1)
        for name in ("num_machines", "num_processes")
    }
    if not launched() and max(counts.values()) > 1:
        asked = " and ".join(f"{name}: {count}" for name, count in counts.items())
        yield (
            f"accelerate launch has {asked}, but starts one process that trains alone. For "
            "several, set distributed_type: MULTI_GPU or FSDP, with use_cpu: true on CPUs, as in "
            "accelerate_configs/ddp_cpu.yaml; for one, --num_machines 1 --num_processes 1."
        )
    use_cpu = options.cpu or getattr(file, "use_cpu", False) or is_on("ACCELERATE_USE_CPU")
    if launched() and on_cpu() and not use_cpu:
        yield (
            f"{CONFIG_FILE} requests GPUs, but torch finds none. Check the driver (nvidia-smi), "
            "and that torch is built for it. For CPUs, use accelerate_configs/ddp_cpu.yaml or "
            "fsdp_cpu.yaml."
        )


def _too_few_gpus() -> Iterator[str]:
    """A sentence if the launcher starts more processes on this machine than it has GPUs.

    accelerate gives several processes the same GPU, which NCCL later refuses as "Duplicate GPU".
    Processes that another program starts may each see one GPU of their own.
    """
    here = processes_here()
    if launcher() is None or on_cpu() or here <= (gpus := torch.accelerator.device_count()):
        return
    yield (
        f"the launcher starts {here} processes on this machine, and {gpus} GPUs are visible. NCCL "
        "takes one process for each: lower num_processes (nproc_per_node of torchrun), or make "
        "more visible (gpu_ids, CUDA_VISIBLE_DEVICES)."
    )


def _wrong_sizes() -> Iterator[str]:
    """A sentence for sizes of a `parallelism_config` that cannot be honoured."""
    if not fsdp_requested():
        yield (
            f"{CONFIG_FILE} has a parallelism_config without distributed_type: FSDP, which all of "
            "its sizes need, tensor parallelism alone included: set it, with fsdp_version: 2, as "
            "in accelerate_configs/tp.yaml, cp.yaml and fsdp_hybrid.yaml. For DDP, remove it."
        )
        return
    names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
    entries = [f"parallelism_config_{name}" for name in names]
    copies, shard, matrices, sequences, other = (int(env_var(e.upper(), "1")) for e in entries)
    product = copies * shard * matrices * sequences
    if shard < 2 and (copies > 1 or matrices * sequences < 2):
        yield (
            f"{CONFIG_FILE} says {entries[1]}: {shard}. One shard is not sharded: set it to the "
            "number of GPUs in a machine, or use accelerate_configs/ddp.yaml."
        )
    elif product != started_processes() and other == 1:
        sizes = zip(entries, (copies, shard, matrices, sequences), strict=False)
        named = " and ".join(f"{entry}: {size}" for entry, size in sizes if size > 1)
        yield (
            f"{CONFIG_FILE} says {named}, which are {product} processes, but "
            f"{started_processes()} run. Their product must be num_processes."
        )
