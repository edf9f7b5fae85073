"""The machine that a run computes on, in words: for the header, and for state.json."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator

from config.schema import RunConfig
from model.cpu.cores import cores
from training.distributed.environment import processes_here
from training.distributed.precision import effective_precision
from training.distributed.strategy import offloads
from training.reporting.console import counted


def machine_line(accelerator: Accelerator) -> str:
    """Processes, device, precision and threads, for the header."""
    count = accelerator.num_processes
    precision = {"no": "float32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)
    parts = [counted(count, "process"), precision]
    if accelerator.device.type == "cpu":
        threads = torch.get_num_threads()
        parts.insert(1, f"CPU with {counted(threads, 'thread')}{' each' if count > 1 else ''}")
    else:
        parts.insert(1, _device_name(accelerator.device))
    if count > 1:
        parts.append(_strategy(accelerator))
    backend = accelerator.state.dynamo_plugin.backend.value.lower()
    if backend != "no":
        whole = not accelerator.state.dynamo_plugin.use_regional_compilation
        parts.append(f"compiled {'whole' if whole else 'by block'} with {backend}")
    return ", ".join(parts)


def computed_on(accelerator: Accelerator) -> str:
    """Everything that the last bits of a step depend on; equal words mean an exact resume."""
    processor = f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}"
    return f"{machine_line(accelerator)}; {processor}; torch {torch.__version__}"


@cache
def _processor() -> str:
    """Its name. On machines with many cores Linux takes long to list them."""
    try:
        facts = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in facts if "model name" in line)
    except (OSError, StopIteration):  # not Linux, or not x86
        return platform.processor() or platform.machine()


def _strategy(accelerator: Accelerator) -> str:
    """'DDP' or 'FSDP', with the special options of the accelerate config file."""
    if not accelerator.is_fsdp2:
        return "DDP"
    plugin, sizes = accelerator.state.fsdp_plugin, accelerator.parallelism_config
    name = "FSDP"
    if sizes is not None and sizes.dp_replicate_size > 1:
        name += f" ({counted(sizes.dp_replicate_size, 'replica')} of {sizes.dp_shard_size} shards)"
    if not plugin.reshard_after_forward:
        name += ", gathered until the backward pass"
    if offloads(accelerator):
        name += ", weights and optimizer on the CPU"
    return name


def machine_hints(accelerator: Accelerator, run: RunConfig) -> list[str]:
    """What would make this machine faster."""
    hints = []
    device, used = accelerator.device, torch.get_num_threads()
    share = cores() // processes_here()
    usable = min(cores(), psutil.cpu_count(logical=False) or cores())  # one thread for each core
    if device.type == "cpu" and accelerator.num_processes == 1 and used < usable:
        hints.append(
            f"{used} of {usable} cores are used. accelerate launch --config_file "
            f"accelerate_configs/cpu.yaml --num_cpu_threads_per_process {usable} uses all of them."
        )
    if device.type != "cpu" and offloads(accelerator) and used < share:
        hints.append(
            f"the optimizer is on the CPU, where each process uses {counted(used, 'thread')}. "
            f"accelerate launch --num_cpu_threads_per_process {share} gives each its share of "
            f"the {cores()} cores."
        )
    if (
        device.type == "cuda"
        and accelerator.mixed_precision == "bf16"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        hints.append(
            f"the accelerate config file says bf16, but {_device_name(device)} has no bf16 "
            "instructions and no fused attention in bf16. Set mixed_precision: "
            f"{'no' if offloads(accelerator) else 'fp16'} there."
        )
    if effective_precision(run) is not None:
        hints.append(
            "the accelerate config file says bf16, but this CPU has no bf16 instructions. The run "
            "uses float32, several times as fast here; run.emulate_bf16=true computes in bf16."
        )
    return hints


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
