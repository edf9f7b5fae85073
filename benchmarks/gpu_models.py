"""Rows of benchmarks/gpu.py: losses of a model of transformers, and new weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from gpu_settings import Row, Settings
from gpu_steps import counted_memory, free_memory, the_device, wait_for_device
from harness import spread
from loss import SMOLLM2, ours, theirs
from measured import PeakMemory
from torch import Tensor, nn

from config.compose import load_config
from config.schema import gpt_config
from model.causal_lm import CausalLM, CausalLMConfig
from model.families import build_empty, build_model

VOCABULARIES = (49_152, 128_256)
ROWS, LENGTH, TURNS = 8, 2048, 5
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
"""The sizes of a rehearsal."""
Loss = Callable[[CausalLM, Tensor, Tensor], Tensor]


def _at_the_output(model: CausalLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What the output layer multiplies, in bf16: hidden (N, C) and its weight (V, C)."""
    hidden = model.base(input_ids=ids, use_cache=False).last_hidden_state
    weight = model.get_output_embeddings().weight
    return hidden.flatten(0, 1).bfloat16(), weight.bfloat16()


def of_torch(model: CausalLM, ids: Tensor, targets: Tensor) -> Tensor:
    """torch's linear_cross_entropy, in chunks of its own choice."""
    options = nn.LinearCrossEntropyOptions()
    hidden, weight = _at_the_output(model, ids)
    return F.linear_cross_entropy(hidden, weight, targets.flatten(), options=options)


def of_liger(model: CausalLM, ids: Tensor, targets: Tensor) -> Tensor:
    """Liger's fused linear cross-entropy, of kernels for GPUs."""
    liger = import_module("liger_kernel.transformers")  # measured if installed, never required
    hidden, weight = _at_the_output(model, ids)
    found: Tensor = liger.LigerFusedLinearCrossEntropyLoss()(weight, hidden, targets.flatten())
    return found


WAYS: dict[str, Loss] = {
    "ours, in chunks": ours,
    "transformers, all logits": theirs,
    "torch linear_cross_entropy": of_torch,
    "Liger": of_liger,
}


def loss_rows(settings: Settings) -> list[Row]:
    """Forward and backward pass of a Llama with SmolLM2's shape under bf16 autocast."""
    rows, length = (2, 32) if settings.rehearse else (ROWS, LENGTH)
    device, found = the_device(), []
    for vocabulary in (settings.vocabulary,) if settings.rehearse else VOCABULARIES:
        content: dict[str, Any] = {**SMOLLM2, **(SMALL if settings.rehearse else {})}
        if settings.rehearse:
            content |= {"num_attention_heads": 2, "num_key_value_heads": 1}
        content |= {"vocab_size": vocabulary, "max_position_embeddings": length}
        with device:
            model = CausalLM(CausalLMConfig.read(content))
        text = torch.randint(vocabulary, (rows, length + 1), device=device)
        ids, targets = text[:, :-1], text[:, 1:].clone()
        targets[:, -1] = -100  # transformers shifts labels itself, and has none for the last
        for name, loss_of in WAYS.items():
            row: Row = {"loss": name, "vocabulary": vocabulary, "tokens": rows * length}
            if loss_of is of_liger and (find_spec("liger_kernel") is None or device.type == "cpu"):
                found.append({**row, "ms": "not installed, or no GPU"})
                continue
            found.append(row | _measured(partial(_pass, model, loss_of, ids, targets)))
    return found


def _pass(model: CausalLM, loss_of: Loss, ids: Tensor, targets: Tensor) -> float:
    """Compute gradients, and return the loss."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        loss = loss_of(model, ids, targets)
    loss.backward()
    model.zero_grad()
    return loss.item()


def _measured(work: Callable[[], float]) -> Row:
    """The loss, the time and the peak of a pass, after one that warms up."""
    value = work()
    free_memory()
    with counted_memory(compiled=False) as peak:
        work()
        most = peak()
    seconds = []
    for _ in range(TURNS):
        wait_for_device()
        begun = time.perf_counter()
        work()
        wait_for_device()
        seconds.append(time.perf_counter() - begun)
    peak_mb = None if most is None else round(most / 1e6)
    times = spread([1e3 * one for one in seconds], 1)
    return {"nats": round(value, 4), "ms": times, "peak MB": peak_mb}


def new_weight_rows(settings: Settings) -> list[Row]:
    """Seconds and host memory until a new model has its weights on the device."""
    sizes = gpt_config(load_config([*settings.preset("gpt2_xl", 8, False)]), settings.vocabulary)
    rows: list[Row] = []
    for name in ("drawn on the device", "built by torch, then moved"):
        free_memory()
        memory, begun = PeakMemory(), time.perf_counter()
        if name.startswith("drawn"):
            accelerator = Accelerator(cpu=the_device().type == "cpu")
            model = accelerator.prepare(build_empty(sizes))
            model.draw_new_weights(seed=1)
            AcceleratorState._reset_state(reset_partial_state=True)
        else:
            model = build_model(sizes).to(the_device())
        wait_for_device()
        weights = sum(one.nbytes for one in model.parameters())
        rows.append(
            {
                "new weights": name,
                "weights MB": round(weights / 1e6),
                "seconds": round(time.perf_counter() - begun, 2),
                "host MB": round(memory.added() / 1e6),
            }
        )
        del model
    return rows
