"""Sharded tensors: the one file of the project that may talk to the other processes itself."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def gather_full(tensor: Tensor) -> Tensor:
    """The whole of a tensor, on this process. Every process must call this, in the same order."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
