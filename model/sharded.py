"""Sharded tensors: gathered from all processes to be written, read back slice by slice.

FSDP and tensor parallelism both make DTensors (`model.tensor`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def reshard(model: nn.Module) -> None:
    """Reshard parameters that a forward pass without a backward pass left gathered.

    After an evaluation FSDP's last group (embeddings, final norm) stays gathered: its parameters
    are then not those of the optimizer, and have 16 bits in mixed precision.
    """
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()  # type: ignore[operator]


def gather_full(tensor: Tensor) -> Tensor:
    """The full tensor, on this process. Every process must call this, in the same order."""
    local: Any = tensor.detach()
    return local.full_tensor() if is_sharded(local) else local


def local_part(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor, which can be written to; all of it if it is not sharded."""
    local: Any = tensor.detach()
    return local.to_local() if is_sharded(local) else local


def slices_of(tensor: Any) -> tuple[slice, ...]:
    """Where `local_part(tensor)` lies in the full tensor, by dimension."""
    shape, first = tuple(tensor.shape), (0,) * tensor.dim()
    if is_sharded(tensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, first = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
    return tuple(slice(begin, begin + size) for begin, size in zip(first, shape, strict=True))


def writes_shard(tensor: Any) -> bool:
    """Whether this process writes its shard: of those that hold the same one, the first does."""
    if not is_sharded(tensor):
        return True
    mesh, coordinates = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    return coordinates is not None and not any(
        placement.is_replicate() and coordinates[dimension]
        for dimension, placement in enumerate(tensor.placements[: mesh.ndim])
    )


def is_sharded(tensor: Any) -> bool:
    """Whether each process holds a part of the tensor: a DTensor."""
    # An import of its class would cost every start half a second, also without FSDP.
    return hasattr(tensor, "full_tensor")
