"""Mixed precision with the same meaning under every strategy.

Weights, sums of gradients, the residual stream and the loss are float32. Matrix products have the
precision that the accelerate config file requests. fp16 has a loss scaler.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import get_mixed_precision_context_manager

from config.schema import RunConfig
from model.causal_lm import LanguageModel
from training.distributed.environment import on_cpu, requested_precision
from training.distributed.strategy import offloads


def cpu_has_bf16() -> bool:
    """Whether the CPU has bf16 matrix instructions (AVX512-BF16, AMX or Arm's)."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def effective_precision(run: RunConfig) -> str | None:
    """`mixed_precision` for the Accelerator: None for the config file's own, or "no".

    "no" replaces bf16 on a CPU without bf16 instructions, where emulation takes up to 13 times as
    long. `run.emulate_bf16` keeps bf16.
    """
    emulated = on_cpu() and not (cpu_has_bf16() or run.emulate_bf16)
    return "no" if requested_precision() == "bf16" and emulated else None


def configure_precision(accelerator: Accelerator, model: LanguageModel) -> None:
    """Correct what accelerate does differently for CPUs and FSDP. Call this before `prepare`."""
    precision = accelerator.mixed_precision
    if precision == "fp16" and accelerator.scaler is None:
        # accelerate silently trains in float32 when fp16 is requested on a CPU.
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler(accelerator.device.type)
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin is not None and accelerator.device.type == "cpu" and offloads(accelerator):
        plugin.cpu_offload = replace(plugin.cpu_offload, pin_memory=False)
    if plugin is not None and precision != "no":
        plugin.mixed_precision_policy = sums_in_float32(plugin.mixed_precision_policy)
        # accelerate does this for every strategy but FSDP2.
        autocast = get_mixed_precision_context_manager(True, accelerator.autocast_handler)
        model.forward = autocast(model.forward)  # type: ignore[method-assign]


def sums_in_float32(policy: Any) -> Any:
    """FSDP's policy with 16-bit weights where they are used and float32 sums of gradients.

    accelerate's policy sums gradients and returns the loss in 16 bits.
    """
    return replace(policy, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False)
