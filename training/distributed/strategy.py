"""DDP and FSDP: what the rest of the project needs to know of how accelerate wraps the model."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DDP_OPTIONS = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
"""Gradients are views of the buckets that DDP sends. Otherwise each gradient exists twice."""


def grads_in_buckets(model: nn.Module) -> bool:
    """Whether gradients are views of DDP's buckets.

    The buckets stay allocated. A gradient that is set to None is allocated again, next to them.
    """
    # When the whole model is compiled, the compiler wraps DDP.
    return any(isinstance(module, DistributedDataParallel) for module in model.modules())


def offloads(accelerator: Accelerator) -> bool:
    """Whether FSDP keeps weights, gradients and optimizer state on the CPU."""
    return accelerator.is_fsdp2 and hasattr(accelerator.state.fsdp_plugin.cpu_offload, "pin_memory")
