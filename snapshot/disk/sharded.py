"""Sharded tensors: the one file of the project that may talk to the other processes itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def reshard(model: nn.Module) -> None:
    """Put the shards back where a forward pass without a backward has left whole parameters.

    After an evaluation FSDP's last group (embeddings, final norm) stays whole: its parameters are
    then others than the optimizer's, and of 16 bits in mixed precision.
    """
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()  # type: ignore[operator]


def gather_full(tensor: Tensor) -> Tensor:
    """The whole of a tensor, on this process. Every process must call this, in the same order."""
    mine: Any = tensor.detach()
    return mine.full_tensor() if is_sharded(mine) else mine


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, to be written into; all of one that is not sharded."""
    mine: Any = tensor.detach()
    return mine.to_local() if is_sharded(mine) else mine


def local_place(tensor: Any) -> tuple[slice, ...]:
    """Where `local_part(tensor)` lies in the whole, a slice for each dimension."""
    shape, first = tuple(tensor.shape), (0,) * tensor.dim()
    if is_sharded(tensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, first = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
    return tuple(slice(at, at + size) for at, size in zip(first, shape, strict=True))


def is_sharded(tensor: Any) -> bool:
    """Whether each process holds only its share of it."""
    # A DTensor; importing its module costs each start half a second, also without FSDP.
    return hasattr(tensor, "full_tensor")
