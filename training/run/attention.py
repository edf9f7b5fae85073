"""How a CPU computes attention: whichever of two ways is faster there, for the shapes of the run.

The last bits of a step depend on it. So the choice is the same on all processes, is in every
snapshot and kept by all later attempts, and is remembered with the prepared texts: a second run of
these shapes on this machine makes the same one.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator

from config.schema import Config
from data.once import temporary_name
from model.attention import KERNEL, PRODUCTS, matmul_attention, use_matmul_attention
from model.causal_lm import LanguageModel
from model.gpt import GPT
from snapshot.disk.state import RunState
from training.distributed.agreement import broadcast_text
from training.reporting.machine import computed_on
from training.run.accelerator import micro_batch_shape

MOST_SCORES = 1 << 20
"""Queries times keys of a measurement; a batch of more is measured in part. A pass of so many
takes milliseconds, so that some fit between the pauses that the host of a virtual machine makes."""
ROUNDS, LEAST_ROUNDS, MOST_SECONDS = 20, 5, 0.5
CLEARLY = 1.15
"""So many times as fast must the way be that is usually slower."""
FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    PRODUCTS: matmul_attention,
    KERNEL: F.scaled_dot_product_attention,
}


def choose_attention(
    accelerator: Accelerator, config: Config, model: LanguageModel, state: RunState
) -> None:
    """Set the way in the model and in the run's state. Every process must call this.

    Nothing is chosen on a GPU, for a model of the Hub, for sequences that are too long for
    products, and where a snapshot of an older version is resumed.
    """
    if accelerator.device.type != "cpu" or not isinstance(model, GPT):
        return
    if config.run.attention != "auto":
        state.attention = config.run.attention
    elif state.attention is None and state.step == 0:
        queries = _queries(accelerator, config)
        if use_matmul_attention(queries, None):
            way = _faster(accelerator, config, queries) if accelerator.is_main_process else None
            state.attention = broadcast_text(accelerator, way)
    model.attend_by(state.attention)


def _queries(accelerator: Accelerator, config: Config) -> torch.Tensor:
    """Random queries (B, H, T, D) of a micro-batch, or of a part of a large one."""
    (batch, time), model = micro_batch_shape(accelerator, config), config.model
    batch = max(1, min(batch, MOST_SCORES // (model.n_head * time * time)))
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
    generator = torch.Generator().manual_seed(0)  # the global one is the training's
    shape = (batch, model.n_head, time, model.n_embd // model.n_head)
    return torch.randn(shape, generator=generator).to(kind or torch.float32)


def _faster(accelerator: Accelerator, config: Config, queries: torch.Tensor) -> str:
    """The way for this machine and these shapes, from the cache or measured."""
    facts = [computed_on(accelerator), list(queries.shape), config.model.dropout]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    path = Path(config.data.cache_dir) / f"attention-{key}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):  # absent or damaged: measure
        way = json.loads(path.read_text(encoding="utf-8"))["way"]
        if way in FUNCTIONS:
            return str(way)
    seconds = _measure(queries, config.model.dropout)
    way = KERNEL if CLEARLY * seconds[KERNEL] < seconds[PRODUCTS] else PRODUCTS
    with suppress(OSError):  # without it, the next run measures as well
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(path)
        temporary.write_text(json.dumps({"facts": facts, "seconds": seconds, "way": way}) + "\n")
        temporary.rename(path)
    return way


def _measure(queries: torch.Tensor, dropout: float) -> dict[str, float]:
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
