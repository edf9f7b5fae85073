"""The experts of a mixture under autocast.

transformers multiplies all experts of a layer with one operation, which torch's autocast does not
know: in bf16 they would compute in float32, and most of a mixture's work is theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

IN_AUTOCAST = "grouped_mm_in_autocast"
"""What transformers calls `in_autocast` of its own "grouped_mm"."""

Forward = Callable[..., Tensor]


def in_autocast(forward: Forward) -> Forward:
    """The forward pass of experts, with the products in autocast's dtype where it is enabled."""

    def compute(experts: Any, hidden: Tensor, *routing: Tensor) -> Tensor:
        kind = hidden.device.type
        if not torch.is_autocast_enabled(kind):
            return forward(experts, hidden, *routing)
        dtype = torch.get_autocast_dtype(kind)
        return forward(_Cast(experts, dtype), hidden.to(dtype), *routing).to(hidden.dtype)

    return compute


class _Cast:
    """Experts whose weights have another dtype. Autograd returns their gradients to the weights."""

    def __init__(self, experts: Any, dtype: torch.dtype) -> None:
        self._experts, self._dtype = experts, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.to(self._dtype) if isinstance(value, Tensor) else value
