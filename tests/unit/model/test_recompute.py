"""Recomputed blocks change memory and work, and no bit of the result."""

from __future__ import annotations

import pytest
import torch
from accelerate.utils import compile_regions
from torch.utils.flop_counter import FlopCounterMode

import families
from model.families import build_model
from model.gpt import GPTConfig
from snapshot.disk.model import model_config

LAYERS, B, T, C = 2, 2, 32, 32
QWEN = {**families.ROTARY, "model_type": "qwen3"}
EACH = pytest.mark.parametrize("name", ["gpt2", "transformers"])
IDS = torch.randint(50, (B, T), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.arange(T).remainder(20).expand(B, -1)


def made(name: str, recompute: bool, dropout: float = 0.0):
    torch.manual_seed(0)
    sizes = GPTConfig(50, T, LAYERS, 4, C, dropout, recompute)
    if name == "transformers":
        sizes = model_config(QWEN, name, dropout, recompute)
    return build_model(sizes).train()


@EACH
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_recomputed_blocks_have_the_same_bits(name, dropout, precision):
    steps, work = [], []
    for recompute in (False, True):
        model = made(name, recompute, dropout)
        torch.manual_seed(5)
        with FlopCounterMode(display=False) as counter:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = model(IDS, IDS, POSITIONS)
            loss.backward()
        work.append(counter.get_total_flops())
        steps.append((loss, torch.get_rng_state(), *(one.grad for one in model.parameters())))
    assert all(map(torch.equal, *steps))
    assert work[0] < work[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("whole", [False, True])
@EACH
def test_a_compiled_model_has_the_same_gradients(name, whole):
    found = []
    for compiled in (False, True):
        model = called = made(name, True)
        if compiled:
            torch.compiler.reset()
            compile_it = torch.compile if whole else compile_regions
            called = compile_it(model, backend="aot_eager")
        called(IDS, IDS, POSITIONS).backward()
        found.append(torch.cat([one.grad.flatten() for one in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
