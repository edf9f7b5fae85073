"""New weights are a function of seed and name; a shard of them is a part of the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import families
from model.causal_lm import CausalLMConfig
from model.families import build_empty, build_model, build_without_memory
from model.gpt import GPT, GPTConfig
from model.layout import ModelError
from model.lora import Lora
from model.new_weights import WithoutMemory, draw

SIZES = {
    "gpt2": GPTConfig(vocab_size=96, block_size=48, n_layer=2, n_head=2, n_embd=64),
    "llama": CausalLMConfig.read(
        {**families.FAMILIES["llama tied"], "vocab_size": 96, "hidden_size": 64}
    ),
}


def fill(model, seed: int) -> None:
    draw(model, build_without_memory(model.config), seed)


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("family", SIZES)
def test_new_weights_have_the_distribution_of_the_family(family, rank):
    sizes = replace(SIZES[family], lora=rank and Lora(rank=rank, alpha=4))
    torch.manual_seed(0)
    expected, model = build_model(sizes), build_empty(sizes)
    state = torch.get_rng_state()
    fill(model, 1)
    assert torch.equal(torch.get_rng_state(), state)
    for (name, one), (other, found) in zip(
        expected.named_parameters(), model.named_parameters(), strict=True
    ):
        assert name == other
        assert (one.shape, one.requires_grad) == (found.shape, found.requires_grad)
        error = 6 / one.numel() ** 0.5
        std, largest = one.std().item(), one.abs().max().item()
        assert found.std().item() == pytest.approx(std, rel=error), name
        assert found.mean().item() == pytest.approx(one.mean().item(), abs=error * std + 1e-9), name
        assert found.abs().max().item() == pytest.approx(largest, rel=0.5), name
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_weights_are_a_function_of_seed_and_name():
    shallow, deep = (build_empty(replace(SIZES["gpt2"], n_layer=n)) for n in (2, 3))
    for model, seed in ((shallow, 1), (deep, 1)):
        fill(model, seed)
    before = {name: one.clone() for name, one in shallow.named_parameters()}
    others = dict(deep.named_parameters())
    residual = (2 / 3) ** 0.5  # GPT-2 scales these weights by the depth
    for name, one in before.items():
        scale = residual if name.endswith("c_proj.weight") else 1
        torch.testing.assert_close(others[name], one * scale)
    fill(shallow, 2)
    matrices = [name for name, one in before.items() if one.dim() == 2]
    changed = dict(shallow.named_parameters())
    assert not any(torch.equal(changed[name], before[name]) for name in matrices)
    flat = torch.cat([before[name].flatten()[:100] for name in matrices])
    assert flat.unique().numel() > 0.99 * flat.numel()  # no two have the same numbers


class Odd(GPT):
    """With what a user may add: torch's own first values, constants, and none."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.convolution = nn.Conv1d(4, 4, 3)
        self.factor = nn.Parameter(torch.full((3, 2), 5.0))
        self.register_buffer("steps", torch.arange(5))


class OddConfig(GPTConfig):
    def build(self) -> Odd:
        return Odd(self)


ODD = OddConfig(**vars(SIZES["gpt2"]))


def test_other_first_values_are_those_of_torch_and_of_constants():
    model = build_empty(ODD)
    fill(model, 1)
    assert 0 < model.convolution.weight.abs().max() <= 12**-0.5
    assert model.factor.equal(torch.full((3, 2), 5.0))
    assert model.steps.equal(torch.arange(5))


def test_a_weight_that_nothing_initialises_is_refused(monkeypatch):
    def incomplete(self, config: GPTConfig) -> None:
        GPT.__init__(self, config)
        self.lost = nn.Parameter(torch.empty(3))

    monkeypatch.setattr(Odd, "__init__", incomplete)
    with pytest.raises(ModelError, match="nothing gives lost a value"):
        fill(build_empty(ODD), 1)


def test_a_buffer_that_is_no_constant_is_refused(monkeypatch):
    def noisy(self, config: GPTConfig) -> None:
        GPT.__init__(self, config)
        self.register_buffer("noise", torch.empty(4).uniform_(1, 2))

    monkeypatch.setattr(Odd, "__init__", noisy)
    with pytest.raises(ModelError, match=r"its buffer \.noise is no constant"):
        build_empty(ODD)


def test_a_model_without_memory_takes_none():
    with WithoutMemory():
        layer = nn.Linear(1 << 20, 1 << 20)  # 4 TB
    assert layer.weight.is_meta
