"""Causal attention on a CPU: torch's kernel, or matrix products where they are faster.

Letters in shapes: B batch, H heads, T positions, D channels of a head.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.cpu.dropout import dropout
from model.gpt import Attention

WAYS = PRODUCTS, KERNEL = "products", "kernel"
MATMUL_ATTENTION_LENGTH = 512
"""The longest sequence for which products are used unless they are requested: they keep T * T
weights for the backward pass."""
QUERY_CHUNK_BYTES = 512
"""Divided by the bytes of a number, the queries of one matrix product: 128 in float32."""
ROUNDS, LEAST_ROUNDS, MOST_SECONDS = 20, 5, 0.5
CLEARLY = 1.15
"""So many times as fast must the way be that is usually slower."""


def matmul_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = True
) -> Tensor:
    """Causal `F.scaled_dot_product_attention` as matrix products.

    Queries, keys, values and the result are each (B, H, T, D). Each chunk of queries is multiplied
    only with the keys that it may attend to.
    """
    assert is_causal
    batch, heads, time, size = query.shape
    chunk = max(1, QUERY_CHUNK_BYTES // query.element_size())
    rows, keys, values = (p.reshape(batch * heads, time, size) for p in (query, key, value))
    mixed = []
    for begin in range(0, time, chunk):
        part = rows[:, begin : begin + chunk]
        end = begin + part.size(1)
        mask = query.new_full((end - begin, end), -math.inf).triu(begin + 1)
        past = keys[:, :end].transpose(1, 2)
        scores = torch.baddbmm(mask, part, past, alpha=size**-0.5)  # (B * H, chunk, end)
        weights = dropout(scores.softmax(dim=-1), dropout_p)
        mixed.append(torch.bmm(weights, values[:, :end]))
    return torch.cat(mixed, dim=1).view(batch, heads, time, size)


class ProductAttention(Attention):
    """The GPT's attention, by products where they are faster."""

    longest = MATMUL_ATTENTION_LENGTH
    """Positions. Longer sequences are left to torch's kernel."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """As `F.scaled_dot_product_attention`, which computes whatever products do not."""
        causal = options.get("is_causal") and options.keys() <= {"is_causal", "dropout_p"}
        if causal and query.size(2) <= self.longest:
            return matmul_attention(query, key, value, **options)
        return super().attend(query, key, value, **options)


FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    PRODUCTS: matmul_attention,
    KERNEL: F.scaled_dot_product_attention,
}


def faster_of(seconds: dict[str, float]) -> str:
    """The way to choose by the seconds of each."""
    return KERNEL if CLEARLY * seconds[KERNEL] < seconds[PRODUCTS] else PRODUCTS


def measure(queries: torch.Tensor, dropout: float) -> dict[str, float]:
    """The least seconds of each way, in turns, with one thread: other programs disturb it least."""
    query, key, value = (queries.clone().requires_grad_() for _ in range(3))
    found: dict[str, list[float]] = {name: [] for name in FUNCTIONS}
    begun, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):  # dropout
        for done in range(ROUNDS + 1):
            for name, attend in FUNCTIONS.items():
                started = time.perf_counter()
                mixed = attend(query, key, value, dropout_p=dropout, is_causal=True)
                mixed.backward(queries)
                if done:  # the first pass prepares kernels
                    found[name].append(time.perf_counter() - started)
            if done >= LEAST_ROUNDS and time.perf_counter() - begun > MOST_SECONDS:
                break
    torch.set_num_threads(threads)
    return {name: min(times) for name, times in found.items()}
