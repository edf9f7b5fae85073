"""How accelerate wraps the model (DDP, FSDP, compilation) and in which precision it computes.

Precision means the same under every strategy: weights, sums of gradients, the residual stream and
the loss are float32, and matrix products have the precision of the accelerate config file. fp16
has a loss scaler.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DynamoBackend,
    get_mixed_precision_context_manager,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from config.schema import ConfigError, RunConfig
from model.family import LanguageModel
from training.distributed.environment import on_cpu, requested_precision

DDP_OPTIONS = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
"""Gradients are views of the buckets that DDP sends. Otherwise each gradient exists twice."""


def is_compiled(accelerator: Accelerator) -> bool:
    """Whether the accelerator compiles the model that it prepares."""
    return bool(accelerator.state.dynamo_plugin.backend != DynamoBackend.NO)


def unwrapped(accelerator: Accelerator, model: nn.Module) -> LanguageModel:
    """The model without the wrappers of DDP and of compilation."""
    if not is_compiled(accelerator) and not isinstance(model, DistributedDataParallel):
        # accelerate would import the compiler, for a second, to see that it is not compiled.
        return cast(LanguageModel, model)
    return cast(LanguageModel, accelerator.unwrap_model(model, keep_torch_compile=False))


def grads_in_buckets(model: nn.Module) -> bool:
    """Whether gradients are views of DDP's buckets.

    The buckets stay allocated. A gradient that is set to None is allocated again, next to them.
    """
    # When the whole model is compiled, the compiler wraps DDP.
    return any(isinstance(module, DistributedDataParallel) for module in model.modules())


def bucket_parameters(model: nn.Module) -> list[list[str]]:
    """The names of the parameters whose gradients each of DDP's buckets carries, in their order.

    Empty without DDP, and before its first backward pass, which decides the buckets.
    """
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            named = module.module.named_parameters()
            trained = [name for name, parameter in named if parameter.requires_grad]
            listed = str(module._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", ""))
            buckets = [bucket.split() for bucket in listed.split(",") if bucket.strip()]
            names = [name.replace("_orig_mod.", "") for name in trained]  # of what is compiled
            return [[names[int(index)] for index in bucket] for bucket in buckets]
    return []


def refuse_other_blocks(accelerator: Accelerator, model: LanguageModel) -> None:
    """Raise ConfigError if the accelerate config file names other blocks than the model's.

    Without that entry, accelerate shards the blocks that the model itself names.
    """
    named = (
        accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap if accelerator.is_fsdp2 else ()
    )
    blocks = sorted(model._no_split_modules)
    if named and sorted(named) != blocks:
        raise ConfigError(
            "the accelerate config file says fsdp_transformer_layer_cls_to_wrap: "
            f"{','.join(named)}. This model's blocks are of the class {','.join(blocks)}: remove "
            "the entry."
        )


def offloads(accelerator: Accelerator) -> bool:
    """Whether FSDP keeps weights, gradients and optimizer state on the CPU."""
    return accelerator.is_fsdp2 and hasattr(accelerator.state.fsdp_plugin.cpu_offload, "pin_memory")


def cpu_has_bf16() -> bool:
    """Whether the CPU has bf16 matrix instructions (AVX512-BF16, AMX or Arm's)."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def effective_precision(run: RunConfig) -> str | None:
    """`mixed_precision` for the Accelerator: None keeps that of the config file; otherwise "no".

    A CPU without bf16 instructions would emulate them, up to 13 times as slowly, so it computes in
    float32. `run.emulate_bf16` keeps bf16.
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
        model.forward = autocast(model.forward)


def sums_in_float32(policy: Any) -> Any:
    """FSDP's policy with 16-bit weights where they are used and float32 sums of gradients.

    accelerate's policy sums gradients and returns the loss in 16 bits.
    """
    return replace(policy, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False)
