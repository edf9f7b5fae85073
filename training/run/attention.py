"""The way in which a CPU computes attention for the shapes of a run: measured once, and kept.

The last bits of a step depend on it. So the choice is the same on all processes, is in every
snapshot and kept by all later attempts, and is remembered with the prepared texts: a second run of
these shapes on this machine makes the same one.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from config.schema import Config
from data.shared_files import temporary_name
from model.cpu.attention import MATMUL_ATTENTION_LENGTH, WAYS, faster_of, measure
from model.gpt import GPT
from snapshot.disk.state import RunState
from training.distributed.agreement import broadcast_text
from training.reporting.machine import computed_on
from training.run.accelerator import micro_batch_shape

MOST_SCORES = 1 << 20
"""Queries times keys of a measurement; a batch of more is measured in part. A pass of so many
takes milliseconds, so that some fit between the pauses that the host of a virtual machine makes."""


def choose_attention(
    accelerator: Accelerator, config: Config, model: nn.Module, state: RunState
) -> None:
    """Set the way in the run's state. Every process must call this.

    Nothing is chosen for a model of the Hub, for sequences that are too long for products, and
    where a snapshot of an older version is resumed.
    """
    if not isinstance(model, GPT):
        return
    if config.run.attention != "auto":
        state.attention = config.run.attention
    elif state.attention is None and state.step == 0:
        queries = _queries(accelerator, config)
        if 1 < queries.size(2) <= MATMUL_ATTENTION_LENGTH:
            way = _faster(accelerator, config, queries) if accelerator.is_main_process else None
            state.attention = broadcast_text(accelerator, way)


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
        if way in WAYS:
            return str(way)
    seconds = measure(queries, config.model.dropout)
    way = faster_of(seconds)
    with suppress(OSError):  # without it, the next run measures as well
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(path)
        temporary.write_text(json.dumps({"facts": facts, "seconds": seconds, "way": way}) + "\n")
        temporary.rename(path)
    return way
