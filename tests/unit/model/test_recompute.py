"""What blocks keep for their backward pass changes memory and work, and no bit of the result."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from accelerate.utils import compile_regions
from torch.utils.flop_counter import FlopCounterMode

import families
from model.families import build_model
from model.gpt import GPTConfig
from model.recompute import WAYS
from snapshot.disk.model import model_config

LAYERS, B, T, C = 2, 2, 32, 32
QWEN = {**families.ROTARY, "model_type": "qwen3"}
NAMES = ("gpt2", "transformers")
EACH = pytest.mark.parametrize("name", NAMES)
IDS = torch.randint(50, (B, T), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.arange(T).remainder(20).expand(B, -1)


def sizes(name: str, way: bool | str = False, dropout: float = 0.0):
    if name == "transformers":
        return model_config(QWEN, name, dropout, way)
    changes = {"dropout": dropout, "activation_checkpointing": way}
    return GPTConfig(50, T, LAYERS, 4, C, **changes)


def made(name: str, way: bool | str, dropout: float = 0.0):
    torch.manual_seed(0)
    return build_model(sizes(name, way, dropout)).train()


def operations(model) -> int:
    """FLOP of a step with torch's kernel: by products, attention is computed again."""
    by_kernel = patch("model.attention.LONGEST_PRODUCTS", 0)
    with by_kernel, FlopCounterMode(display=False) as counter:
        model(IDS, IDS).backward()
    return counter.get_total_flops()


@EACH
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_every_way_has_the_same_bits(name, dropout, precision):
    found = []
    for way in WAYS:
        model = made(name, way, dropout)
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(IDS, IDS, POSITIONS)
        loss.backward()
        gradients = [one.grad for one in model.parameters()]
        found.append((loss, torch.get_rng_state(), *gradients))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@EACH
def test_no_product_is_computed_again_by_selective(name):
    nothing, whole, selective = (operations(made(name, way)) for way in WAYS)
    assert selective == nothing < whole


@EACH
def test_attention_with_dropout_is_computed_again(name):
    """It advances the generator, as it did the first time."""
    nothing, whole, selective = (operations(made(name, way, 0.2)) for way in WAYS)
    assert nothing < selective < whole


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize("name", ["gpt2", "transformers"])
def test_a_compiled_model_has_the_same_gradients(name, way, whole):
    found = []
    for compiled in (False, True):
        model = called = made(name, way)
        if compiled:
            torch.compiler.reset()
            compile_it = torch.compile if whole else compile_regions
            called = compile_it(model, backend="aot_eager")
        called(IDS, IDS, POSITIONS).backward()
        found.append(torch.cat([one.grad.flatten() for one in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
