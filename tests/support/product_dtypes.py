"""The dtypes of a step's matrix products, forward and backward, as torch's dispatcher sees them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = (
    *("mm", "addmm", "bmm", "baddbmm", "dot", "mv", "linear", "convolution", "_scaled_mm"),
    *("_grouped_mm", "mkldnn_linear"),
)
"""torch's operations that multiply matrices. A kernel of attention multiplies as well."""
ATTENTION = "scaled_dot_product"


class Products(TorchDispatchMode):
    """While active, counts products by their operation and the dtypes that they multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in PRODUCTS or ATTENTION in name:
            tensors = [one for one in tree_leaves(args) if isinstance(one, Tensor) and one.dim()]
            factors = [one for one in tensors if one.is_floating_point() and one.dim() >= 2]
            # torchao's tensor of eight bits says that it has the bits of its origin.
            factors = [getattr(one, "_data", one) for one in factors]
            if ATTENTION in name:  # the backward pass also gets the sums of its softmax, in float32
                factors = factors[:3]
            if not is_outer(factors):
                found = sorted({str(one.dtype).removeprefix("torch.") for one in factors})
                self.counts[name, " x ".join(found)] += 1
        return func(*args, **(kwargs or {}))

    def by_dtype(self) -> dict[str, int]:
        """The number of products by the dtypes that they multiply."""
        found: Counter[str] = Counter()
        for (_, dtypes), count in self.counts.items():
            found[dtypes] += count
        return dict(found)


def is_outer(factors: list[Tensor]) -> bool:
    """Whether a product sums over one number: the angles of positions, which need float32."""
    return len(factors) == 2 and factors[0].shape[-1] == 1 == factors[1].shape[-2]


def products_of_step(model: torch.nn.Module, ids: Tensor) -> Products:
    """The products of a forward and a backward pass in bf16, as `Accelerator` trains."""
    with Products() as products:
        with torch.autocast(ids.device.type, torch.bfloat16):
            loss = model(ids, ids)
        loss.float().backward()
    return products
