"""Entries of the accelerate config file, and launches, that are refused by name.

Otherwise accelerate or torch would ignore them silently and train something else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser

from model.fp8 import RECIPES
from training.distributed.launcher import (
    asked_machines,
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
FP8_CAPABILITY = (8, 9)
FOREIGN_ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": "DEEPSPEED, which keeps the optimizer's state in a format of its "
    "own, so a snapshot would fit no other shape. distributed_type: FSDP shards as ZeRO stage 3 "
    "does: docs/parallelism.md has its entries for those of DeepSpeed.",
    "ACCELERATE_USE_MEGATRON_LM": "MEGATRON_LM, which has models and a loop of its own. Use "
    "distributed_type: FSDP with parallelism_config_tp_size for its tensor parallelism and "
    "parallelism_config_cp_size for long sequences. Pipeline stages are not supported: they need a "
    "loop in which each process computes some of the blocks, for one micro-batch after another.",
    "ACCELERATE_USE_SAGEMAKER": "SageMaker, whose launcher is not supported. Use distributed_type: "
    "MULTI_GPU (DDP) or FSDP, on machines that you start yourself.",
}
"""What the config file requests, and what to do instead, by the variable of the launcher."""
OF_EACH_PROCESS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
OFF = "FALSE F NO N OFF 0"
RECOMPUTES = (
    "It recomputes with different dropout masks, so gradients would be wrong. Remove it, and pass "
    "model.activation_checkpointing=true to train.py."
)
OF_VERSION_1 = "It belongs to version 1 and would be ignored"
ENTRIES = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        "1 AUTO",
        "Accumulation follows from train.global_batch_size and train.micro_batch_size: remove the "
        "entry.",
    ),
    "ACCELERATE_FP8_BACKEND": ("AO NO", "Only torchao is supported: set AO."),
    "ACCELERATE_FP8_RECIPE_NAME": (
        " ".join(RECIPES).upper(),
        f"torchao's are {', '.join(RECIPES)}.",
    ),
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
    "FSDP_ACTIVATION_CHECKPOINTING": (OFF, RECOMPUTES),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": (OFF, RECOMPUTES),
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
        f"{OF_VERSION_1}. Version 2 has fsdp_reshard_after_forward and parallelism_config: see "
        "accelerate_configs/fsdp_hybrid.yaml.",
    ),
    "FSDP_FORWARD_PREFETCH": (OFF, f"{OF_VERSION_1}; version 2 always prefetches. Remove it."),
    "FSDP_BACKWARD_PREFETCH": (
        "NONE BACKWARD_PRE",
        "Version 2 always uses BACKWARD_PRE. Remove it.",
    ),
    "FSDP_OFFLOAD_PARAMS": (
        OFF,
        "With mixed_precision: fp16, gradients on the CPU may be scaled before the scale has "
        "arrived from the GPU. Set mixed_precision to bf16 or no.",
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
NAMES = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_FP8_BACKEND": "fp8_config backend",
    "ACCELERATE_FP8_RECIPE_NAME": "fp8_config recipe_name",
}
"""Entries that are not named as their variable in small letters."""


def refusals() -> list[str]:
    """A sentence for each entry of the accelerate config file that cannot be honoured."""
    found = [*_left_over(), *_ignored_by_launcher(), *_too_few_gpus()]
    found += _several_numbers_of_machines()
    engines = [why for variable, why in FOREIGN_ENGINES.items() if is_on(variable)]
    found += [f"{CONFIG_FILE} requests {why}" for why in engines]
    for variable, (right, remedy) in ENTRIES.items():
        value = env_var(variable) or UNSET.get(variable, "")
        if value and value.upper() not in right.split() and _is_read(variable):
            name = NAMES.get(variable, variable.lower())
            found.append(f"{CONFIG_FILE} says {name}: {value}. {remedy}")
    if requested_precision() == "fp8":
        found += _gpus_without_fp8()
    if is_on("ACCELERATE_USE_PARALLELISM_CONFIG"):
        found += _wrong_sizes()
    if fsdp_requested() and started_processes() == 1 and not found:
        found.append(
            f"{CONFIG_FILE} says distributed_type: FSDP with num_processes: 1. One process has "
            "nothing to shard: use accelerate_configs/cpu.yaml or single_gpu.yaml."
        )
    return found


def _is_read(variable: str) -> bool:
    """Whether the value of a variable would change anything."""
    if not variable.startswith(("FSDP_", "PARALLELISM_")):
        return True
    if variable == "FSDP_OFFLOAD_PARAMS" and (requested_precision() != "fp16" or on_cpu()):
        return False
    return fsdp_requested() and (variable == "FSDP_VERSION" or env_var("FSDP_VERSION") == "2")


def _left_over() -> Iterator[str]:
    """A sentence if the environment names several processes, and less than their launcher sets."""
    values = {name: env_var(name) for name in OF_EACH_PROCESS}
    missing = [name for name, value in values.items() if not value]
    # accelerate takes a process with LOCAL_RANK for one of several, and no empty WORLD_SIZE.
    is_one_of_several = started_processes() > 1 or values["LOCAL_RANK"]
    if missing and (is_one_of_several or not env_var("WORLD_SIZE", "1")):
        found = [f"{name}={value}" for name, value in values.items() if value] or ["WORLD_SIZE="]
        yield (
            f"the environment has {' and '.join(found)}, as for one of several processes, but no "
            f"{' and no '.join(missing)}. For one process, unset {' '.join(OF_EACH_PROCESS)}; for "
            "several, start train.py with `accelerate launch`."
        )


def _read_by_launcher() -> tuple[Any, Any] | None:
    """The options of `accelerate launch` and its config file, if it has one, as its parser reads.

    None for another launcher.
    """
    started_by = launcher()
    if started_by is None or "accelerate" not in Path(started_by.command[0]).name:
        return None
    words = started_by.command[1:]
    words = words[1:] if words[:1] == ("launch",) else words
    try:
        options = launch_command_parser().parse_args(list(words))
        file = None
        if options.config_file or (Path(default_config_file).is_file() and not options.cpu):
            file = load_config_from_file(options.config_file)
    except (SystemExit, OSError, ValueError):  # options of another version
        return None
    return options, file


def _ignored_by_launcher() -> Iterator[str]:
    """A sentence for the options that `accelerate launch` ignores silently."""
    if (read := _read_by_launcher()) is None:
        return
    options, file = read

    def either(name: str) -> Any:
        given = getattr(options, name, None)
        return getattr(file, name, None) if given is None else given

    if options.cpu:
        kind = "--cpu"
    elif file is None:
        kind = "without --multi_gpu"
    else:
        kind = f"distributed_type: {file.distributed_type.value}"
    processes, machines = int(either("num_processes") or 1), int(either("num_machines") or 1)
    if not launched() and (processes > 1 or machines > 1):
        yield (
            f"accelerate launch has num_machines: {machines} and num_processes: {processes}, but "
            f"starts one process that trains alone ({kind}). For several, set distributed_type: "
            "MULTI_GPU or FSDP, with use_cpu: true on CPUs, as in "
            "accelerate_configs/ddp_cpu.yaml; for one, --num_machines 1 --num_processes 1."
        )
        return
    gpu_ids = str(either("gpu_ids") or "all")
    several = launched() and gpu_ids == "all"
    wanted = several or any(name.strip().isdigit() for name in gpu_ids.split(","))
    use_cpu = options.cpu or getattr(file, "use_cpu", False) or is_on("ACCELERATE_USE_CPU")
    if wanted and not use_cpu and on_cpu():
        yield (
            f"{CONFIG_FILE} requests GPUs ({kind}, gpu_ids: {gpu_ids}), but torch finds none. "
            "Check the driver (nvidia-smi), and that torch is built for it. For CPUs, use "
            "accelerate_configs/cpu.yaml, ddp_cpu.yaml or fsdp_cpu.yaml."
        )


def _too_few_gpus() -> Iterator[str]:
    """A sentence if the launcher starts more processes on this machine than it has GPUs.

    accelerate gives several processes the same GPU, which NCCL later refuses as "Duplicate GPU".
    Processes that another program starts may each see one GPU of their own.
    """
    started_by, here = launcher(), processes_here()
    if started_by is None or on_cpu() or here <= (gpus := torch.accelerator.device_count()):
        return
    machines = max(1, started_processes() // here)
    if "accelerate" in Path(started_by.command[0]).name:
        key, value, most = "num_processes", started_processes(), gpus * machines
    else:
        key, value, most = "nproc_per_node", here, gpus
    each = f" on each of {machines} machines" * (machines > 1)
    visible = env_var("CUDA_VISIBLE_DEVICES")
    why = f" (CUDA_VISIBLE_DEVICES={visible}, which gpu_ids sets)" * bool(visible)
    have = "1 GPU is" if gpus == 1 else f"{gpus} GPUs are"
    yield (
        f"{key}: {value} starts {here} processes{each}, but {have} visible there{why}, and NCCL "
        f"takes one process for each. Launch with --{key} {most}, or make more GPUs visible."
    )


def _several_numbers_of_machines() -> Iterator[str]:
    """A sentence if machines could join and leave: the launcher's `--nnodes` is a range."""
    least, _, most = asked_machines().partition(":")
    if most not in ("", least):
        yield (
            f"--nnodes (PET_NNODES) is {least}:{most}: the number of machines must be one number. "
            "Stop and start with another: any snapshot resumes in any shape."
        )


def _gpus_without_fp8() -> Iterator[str]:
    """accelerate itself computes in fp16 there, after a warning. A CPU emulates fp8."""
    if on_cpu():
        return
    kind = torch.accelerator.current_accelerator()
    if kind is None or kind.type != "cuda":
        yield f"mixed_precision: fp8 needs a GPU of CUDA, and this is {kind}. Use bf16."
    elif (capability := torch.cuda.get_device_capability()) < FP8_CAPABILITY:
        has, needed = (".".join(map(str, one)) for one in (capability, FP8_CAPABILITY))
        yield (
            f"{CONFIG_FILE} says mixed_precision: fp8, which needs an NVIDIA GPU of compute "
            f"capability {needed} (Ada, Hopper) or later. {torch.cuda.get_device_name()} has "
            f"{has}: set mixed_precision: bf16."
        )


def _wrong_sizes() -> Iterator[str]:
    """Sentences for a `parallelism_config` that cannot be honoured."""
    if not fsdp_requested():
        yield (
            f"{CONFIG_FILE} has a parallelism_config without distributed_type: FSDP, which all of "
            "its sizes need, tensor parallelism alone included: set it, with fsdp_version: 2, as "
            "in accelerate_configs/tp.yaml, cp.yaml and fsdp_hybrid.yaml. For DDP, remove it."
        )
        return
    entry = "parallelism_config"
    names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
    sizes = {name: int(env_var(f"{entry}_{name}".upper(), "1")) for name in names}
    # The launcher sets its default, allgather, for a file that says nothing.
    read = _read_by_launcher()
    written = {} if read is None or read[1] is None else read[1].parallelism_config
    strategy = written.get(f"{entry}_cp_comm_strategy", "alltoall")
    if sizes["cp_size"] > 1 and strategy != "alltoall":
        yield (
            f"{CONFIG_FILE} says {entry}_cp_comm_strategy: {strategy}. Processes that share a "
            "sequence exchange heads in attention: set it to alltoall, or remove the entry."
        )
    shard, shared = sizes["dp_shard_size"], sizes["cp_size"] * sizes["tp_size"]
    processes = math.prod(sizes.values())
    if shard * shared < 2:
        yield (
            f"{CONFIG_FILE} says {entry}_dp_shard_size: {shard}. One shard is not sharded: set "
            "it to the number of GPUs in a machine, or use accelerate_configs/ddp.yaml."
        )
    elif shard < 2 <= sizes["dp_replicate_size"]:
        yield (
            f"{CONFIG_FILE} says {entry}_dp_replicate_size: {sizes['dp_replicate_size']} with "
            f"{entry}_{'cp' if sizes['cp_size'] > 1 else 'tp'}_size: {shared}, which needs "
            f"{entry}_dp_shard_size: 2 or more. Set {entry}_dp_replicate_size to 1, or shard."
        )
    elif processes != started_processes() and sizes["sp_size"] == 1:
        named = [f"{entry}_{name}: {size}" for name, size in sizes.items() if size > 1]
        yield (
            f"{CONFIG_FILE} says {' and '.join(named)}, which are {processes} processes, but "
            f"{started_processes()} run. Their product must be num_processes."
        )
