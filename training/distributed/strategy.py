"""DDP and FSDP: facts about how accelerate wraps the model."""

from __future__ import annotations

from typing import cast

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DynamoBackend
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from config.schema import ConfigError
from model.causal_lm import LanguageModel

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
            named = [name for name, one in module.module.named_parameters() if one.requires_grad]
            listed = str(module._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", ""))
            buckets = [bucket.split() for bucket in listed.split(",") if bucket.strip()]
            names = [name.replace("_orig_mod.", "") for name in named]  # of what is compiled
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
