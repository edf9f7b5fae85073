"""Attention of our models, and its kernels on CUDA devices, by the names of `run.attention`.

Only that key chooses one, for our models and those of transformers: a config.json never does. On a
CPU our models attend by matrix products or by torch's kernel. The kernels of CUDA are reached
through torch's own attention, so a package is needed for FlashAttention 3 and 4 alone.

Letters in shapes: B batch, H heads, T positions, D channels of a head.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.documents import Rows

CPU_WAYS = PRODUCTS, KERNEL = "products", "kernel"
LONGEST_PRODUCTS = 512
"""The longest sequence for which products are used unless they are requested: they keep T * T
weights for the backward pass."""
QUERY_CHUNK_BYTES = 512
"""Divided by the bytes of a number, the queries of one matrix product: 128 in float32."""
SIXTEEN_BITS = ("bf16", "fp16")
"""Precisions, by accelerate's names."""
HEAD_MULTIPLE = 8


@dataclass(frozen=True)
class Kernel:
    """What a kernel is, and what it can compute."""

    title: str
    majors: tuple[int, ...]
    """Major numbers of the compute capabilities that it supports."""
    largest_head: int = 256
    """Channels; a multiple of `HEAD_MULTIPLE`."""
    implementation: str | None = None
    """The name by which torch activates a FlashAttention that is not its own."""
    package: str | None = None
    """The module that has it."""

    def why_not(self, precision: str, dropout: float) -> str | None:
        """Why a run cannot use it, whatever the device: the end of a sentence."""
        if precision not in SIXTEEN_BITS:
            return (
                f"computes in 16 bits, and the run in {precision.replace('no', 'float32')}. Set "
                "mixed_precision: bf16 in the accelerate config file"
            )
        if dropout:
            return f"has no dropout, and model.dropout={dropout}. Set that to 0, or use kernel"
        return None

    def why_not_here(self, device: torch.device) -> str | None:
        """Why this machine cannot use it."""
        if device.type != "cuda":
            return f"runs on CUDA devices, and this run computes on {device}. Leave it out"
        if self.package is not None and find_spec(self.package.partition(".")[0]) is None:
            return f"needs the package {self.package.partition('.')[0]}, which is not installed"
        major, minor = torch.cuda.get_device_capability(device)
        if major not in self.majors:
            name = torch.cuda.get_device_name(device)
            known = " or ".join(f"{one}.x" for one in self.majors)
            return f"needs compute capability {known}, and {name} has {major}.{minor}. Use kernel"
        return None

    def why_not_for(self, head_size: int) -> str | None:
        """Why it cannot compute heads of so many channels."""
        if head_size % HEAD_MULTIPLE == 0 and head_size <= self.largest_head:
            return None
        return (
            f"takes heads of {HEAD_MULTIPLE} to {self.largest_head} channels in multiples of "
            f"{HEAD_MULTIPLE}, and the model's have {head_size}. Use kernel"
        )

    def activate(self) -> None:
        """Have torch's attention use it from now on."""
        if self.implementation is not None:
            from torch.nn.attention import activate_flash_attention_impl

            activate_flash_attention_impl(self.implementation)


VARLEN, FLASH3, FLASH4 = "varlen", "flash3", "flash4"
KERNELS = {
    VARLEN: Kernel("torch's variable-length kernel", (8, 9, 10, 11, 12)),
    FLASH3: Kernel("FlashAttention 3", (9,), implementation="FA3", package="flash_attn_interface"),
    FLASH4: Kernel(
        "FlashAttention 4",
        (9, 10),
        largest_head=128,
        implementation="FA4",
        package="flash_attn.cute.interface",
    ),
}
"""They take documents in a row without a mask, and have no dropout."""


class Attend(nn.Module):
    """Causal attention of our models."""

    longest_products = LONGEST_PRODUCTS
    """Positions up to which a CPU computes products of matrices."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: Rows | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
    ) -> Tensor:
        """Queries, keys and values (B, H, T, D) to (B, H, T, D), within the documents of `rows`."""
        if rows is not None:
            return rows.attend(query, key, value, dropout_p)
        is_short = query.size(2) <= self.longest_products
        if is_causal and is_short and query.device.type == "cpu":
            return attend_by_products(query, key, value, dropout_p)
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout_p, is_causal=is_causal
        )


def use_on_cpu(model: nn.Module, way: str | None) -> None:
    """Have our model attend in one of `CPU_WAYS` on a CPU; otherwise by products if it is short."""
    longest = {PRODUCTS: sys.maxsize, KERNEL: 0}.get(way or "", LONGEST_PRODUCTS)
    for module in model.modules():
        if isinstance(module, Attend):
            module.longest_products = longest


def attend_by_products(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0) -> Tensor:
    """Causal `F.scaled_dot_product_attention` as matrix products, which a CPU computes faster.

    Queries, keys, values and the result are each (B, H, T, D). Each chunk of queries is multiplied
    only with the keys that it may attend to.
    """
    batch, heads, time, size = query.shape
    chunk = max(1, QUERY_CHUNK_BYTES // query.element_size())
    flat = (batch * heads, time, size)
    rows, keys, values = query.reshape(flat), key.reshape(flat), value.reshape(flat)
    mixed = []
    for begin in range(0, time, chunk):
        part = rows[:, begin : begin + chunk]
        end = begin + part.size(1)
        mask = query.new_full((end - begin, end), -math.inf).triu(begin + 1)
        past = keys[:, :end].transpose(1, 2)
        scores = torch.baddbmm(mask, part, past, alpha=size**-0.5)  # (B * H, chunk, end)
        weights = F.dropout(scores.softmax(dim=-1), dropout_p)
        mixed.append(torch.bmm(weights, values[:, :end]))
    return torch.cat(mixed, dim=1).view(batch, heads, time, size)
