"""Which attention is faster on this machine, by a measurement: products or torch's kernel."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from cpu.attention import KERNEL, PRODUCTS, matmul_attention

ROUNDS, LEAST_ROUNDS, MOST_SECONDS = 20, 5, 0.5
CLEARLY = 1.15
"""So many times as fast must the way be that is usually slower."""
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
