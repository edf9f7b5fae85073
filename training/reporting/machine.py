"""The machine that a run computes on, in words, and how much of it the run uses (MFU).

The model FLOP utilisation of Chowdhery et al. (2022, appendix B) counts what the model needs, not
what is computed: a recomputed block counts once.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from accelerate import Accelerator

from config.schema import Config, RunConfig
from model.family import LanguageModel
from training.distributed.accelerator import (
    effective_precision,
    offloads,
    replicas,
    syncs_each_micro_batch,
)
from training.distributed.launcher import (
    fp8_recipe,
    processes_here,
    requested_precision,
    started_processes,
)
from training.distributed.sharing import context_size, tensor_size

PEAKS = (
    (r"\bB200\b", 2250e12),
    (r"\bH100 PCIe\b", 756e12),
    (r"\bH100 NVL\b", 835e12),
    (r"\b(H100|H200|GH200)\b", 989e12),
    (r"\bA100\b", 312e12),
    (r"\bL40S\b", 362e12),
    (r"\bL4\b", 121e12),
    (r"\bA10G\b", 70e12),
    (r"\bRTX 4090\b", 165e12),
    (r"\bRTX 3090\b", 71e12),
    (r"\bV100\b", 125e12),
    (r"\bT4\b", 65e12),
)
"""FLOP/s by the name of a GPU, as NVIDIA publishes them: 16-bit tensor cores with float32 sums and
without sparsity. V100 and T4 support only fp16."""
TESTED_TORCH = "2.13.0"
"""The version that requirements.txt pins."""
ONLY_FP16 = r"\b(V100|T4)\b"


def counted(number: int, noun: str) -> str:
    """'1 process', '2 processes', '2 threads'."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{ending}"


def machine_line(accelerator: Accelerator, run: RunConfig) -> str:
    """Processes, device, precision and threads: a line of the header."""
    count = accelerator.num_processes
    precision = {"no": "float32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)
    if run.tf32:
        precision += " with products in TF32"
    if (recipe := fp8_recipe()) is not None:
        emulated = ", emulated" * (accelerator.device.type == "cpu")
        precision += f" with products in fp8 ({recipe}{emulated})"
    parts = [counted(count, "process"), precision]
    if accelerator.device.type == "cpu":
        threads = torch.get_num_threads()
        parts.insert(1, f"CPU with {counted(threads, 'thread')}{' each' if count > 1 else ''}")
    else:
        parts.insert(1, _device_name(accelerator.device))
    if count > 1:
        parts.append(_strategy(accelerator))
        parts += ["gradients reduced in bf16"] * (run.reduce_dtype == "bf16")
    backend = accelerator.state.dynamo_plugin.backend.value.lower()
    if backend != "no":
        whole = not accelerator.state.dynamo_plugin.use_regional_compilation
        parts.append(f"compiled {'whole' if whole else 'by block'} with {backend}")
    return ", ".join(parts)


def computed_on(accelerator: Accelerator, run: RunConfig) -> str:
    """What the last bits of a step depend on: a resume is exact where these words are equal."""
    processor = f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}"
    return f"{machine_line(accelerator, run)}; {processor}; torch {torch.__version__}"


@cache
def _processor() -> str:
    """The name of the processor. Read once, as Linux takes long to list many cores."""
    try:
        facts = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in facts if "model name" in line)
    except (OSError, StopIteration):  # not Linux, or not x86
        return platform.processor() or platform.machine()


def _strategy(accelerator: Accelerator) -> str:
    """'DDP' or 'FSDP', with the special options of the accelerate config file."""
    if not accelerator.is_fsdp2:
        machines = started_processes() // processes_here()
        return "DDP" if machines == 1 else f"DDP over {counted(machines, 'machine')}"
    plugin, several = accelerator.state.fsdp_plugin, accelerator.gradient_accumulation_steps > 1
    name = "FSDP"
    shared = context_size(accelerator)
    if (copies := replicas(accelerator)) > 1:
        shards = shared * accelerator.parallelism_config.dp_shard_size
        once = ", added up once a step" if several else ""
        name += f" ({counted(copies, 'replica')} of {shards} shards{once})"
    if several and not syncs_each_micro_batch(accelerator):
        name += ", whole weights and gradients over a step's micro-batches"
    elif not plugin.reshard_after_forward:
        name += ", gathered until the backward pass"
    if offloads(accelerator):
        name += ", weights and optimizer on the CPU"
    if shared > 1:
        name += f", each sequence shared by {shared} processes"
    if (sharing := tensor_size(accelerator)) > 1:
        name += f", each matrix shared by {sharing} processes"
    return name


def machine_hints(accelerator: Accelerator) -> list[str]:
    """What of this machine or its torch the run does not suit."""
    hints, device = [], accelerator.device
    if torch.__version__.split("+")[0] != TESTED_TORCH:
        hints.append(
            f"torch {torch.__version__} is installed; the tested version is {TESTED_TORCH} "
            "(requirements.txt). A run resumes bit for bit only within one version."
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
    if effective_precision() == "no":
        hints.append(
            f"the accelerate config file says {requested_precision()}, but this CPU has no bf16 "
            "instructions. The run uses float32, several times as fast here."
        )
    return hints


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


@dataclass(frozen=True)
class Speed:
    """What a token costs, and what the machine could compute."""

    flops_per_token: float | None
    """FLOP per token; None for a mixture of experts."""
    peak: float | None
    """FLOP/s of all processes; None if it is unknown."""

    def share(self, tokens_per_second: float) -> float | None:
        """A speed as a share of the peak (MFU); None if it is unknown."""
        if self.flops_per_token is None or self.peak is None:
            return None
        return tokens_per_second * self.flops_per_token / self.peak


def speed_of(model: LanguageModel, config: Config, accelerator: Accelerator) -> Speed:
    """The cost of a token of this model, and the peak of all processes."""
    device, flops = accelerator.device, model.flops_per_token(config.data.block_size)
    peak = None
    if device.type == "cuda":
        peak = published_peak(torch.cuda.get_device_name(device), accelerator.mixed_precision)
    total = None if peak is None else peak * fp8_gain(model, flops) * accelerator.num_processes
    return Speed(flops, total)


def fp8_gain(model: LanguageModel, flops_per_token: float | None) -> float:
    """How many times the peak in 16 bits a GPU has for this model: fp8 is twice as fast."""
    if model.fp8 is None or model.fp8.emulated or flops_per_token is None:
        return 1.0
    return 1 / (1 - model.fp8.flops_per_token / flops_per_token / 2)


def published_peak(name: str, precision: str) -> float | None:
    """FLOP/s of a GPU by its name; None if that is unknown for this precision."""
    if precision == "no" or (precision == "bf16" and re.search(ONLY_FP16, name)):
        return None
    return next((peak for pattern, peak in PEAKS if re.search(pattern, name)), None)
