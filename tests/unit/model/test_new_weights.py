"""New weights are a function of seed and name; a shard of them is a part of the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import families
from model import new_weights
from model.causal_lm import CausalLMConfig
from model.families import build_empty, build_model
from model.gpt import GPTConfig
from model.layout import ModelError
from model.lora import Lora
from model.new_weights import END, NewWeights, Recording
from model.sharded import Piece

SIZES = {
    "gpt2": GPTConfig(vocab_size=96, block_size=48, n_layer=2, n_head=2, n_embd=64),
    "llama": CausalLMConfig.read(
        {**families.FAMILIES["llama tied"], "vocab_size": 96, "hidden_size": 64}
    ),
}


class Odd(nn.Module):
    """What no family of ours does, but a user's or one of transformers may."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn_before = nn.Parameter(nn.init.normal_(torch.empty(7, 5), std=3.0))
        self.random = nn.Parameter(torch.randn(6, 4))
        self.constant = nn.Parameter(torch.full((3, 2), 5.0))
        self.truncated = nn.Parameter(torch.empty(40, 30))
        self.orthogonal = nn.Parameter(torch.empty(8, 8))
        self.computed = nn.Parameter(torch.empty(9))
        self.copied = nn.Parameter(torch.empty(40, 30))
        self.scaled = nn.Parameter(torch.empty(12, 3))
        self.embedding = nn.Embedding(11, 4, padding_idx=2)
        self.reassigned = nn.Linear(3, 4)
        self.scalar = nn.Parameter(torch.empty(()))
        self.register_buffer("steps", torch.arange(5))
        self.register_buffer("noise", torch.empty(4).uniform_(1, 2))
        self.first_values()

    @torch.no_grad()
    def first_values(self) -> None:
        nn.init.trunc_normal_(self.truncated, std=0.5, a=-0.6, b=0.6)
        nn.init.orthogonal_(self.orthogonal)
        noise = torch.rand(9, device=self.computed.device)
        self.computed.copy_(torch.stack((noise, 1 - noise)).sum(0) * torch.arange(9.0))
        self.copied.copy_(self.truncated * 2)
        self.scaled.fill_(3.0).mul_(2).add_(1)
        self.reassigned.bias.data = self.reassigned.bias.data.clone().zero_()
        self.scalar.fill_(2.5)


def odd() -> tuple[Odd, NewWeights]:
    with (recording := Recording()):
        module = Odd()
    return module, NewWeights(recording, dict(module.named_parameters()))


def drawn(new: NewWeights, name: str, shape: torch.Size, seed: int = 1) -> torch.Tensor:
    target = torch.full(shape, torch.nan)
    new.draw(name, target, seed)
    return target


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("family", SIZES)
def test_new_weights_have_the_distribution_of_the_family(family, rank):
    sizes = replace(SIZES[family], lora=rank and Lora(rank=rank, alpha=4))
    torch.manual_seed(0)
    expected, model = build_model(sizes), build_empty(sizes)
    state = torch.get_rng_state()
    model.draw_new_weights(seed=1)
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
        model.draw_new_weights(seed)
    before = {name: one.clone() for name, one in shallow.named_parameters()}
    others = dict(deep.named_parameters())
    residual = (2 / 3) ** 0.5  # GPT-2 scales these weights by the depth
    for name, one in before.items():
        scale = residual if name.endswith("c_proj.weight") else 1
        torch.testing.assert_close(others[name], one * scale)
    shallow.draw_new_weights(2)
    matrices = [name for name, one in before.items() if one.dim() == 2]
    changed = dict(shallow.named_parameters())
    assert not any(torch.equal(changed[name], before[name]) for name in matrices)
    flat = torch.cat([before[name].flatten()[:100] for name in matrices])
    assert flat.unique().numel() > 0.99 * flat.numel()  # no two have the same numbers


def test_each_weight_is_drawn_once(monkeypatch):
    seeds = []
    seed_of = new_weights._seed_of
    monkeypatch.setattr(new_weights, "_seed_of", lambda *of: seeds.append(of) or seed_of(*of))
    model = build_empty(SIZES["gpt2"])
    model.draw_new_weights(1)
    assert len(seeds) == len(set(seeds)) == len(list(model.parameters()))
    assert all(len(model.new_weights._live(one, END)) == 1 for one in _sources(model))


def _sources(model) -> list[torch.Tensor]:
    return list(model.new_weights._parameters.values())


def at_once(slices: tuple[slice, ...]) -> Piece:
    """A process's part of a tensor, if it is one piece."""
    return Piece(tuple(slice(0, one.stop - one.start) for one in slices), slices)


@pytest.mark.parametrize("processes", [2, 3, 4, 7])
def test_shards_are_parts_of_the_whole(monkeypatch, processes):
    monkeypatch.setattr(new_weights, "BLOCK", 100)
    module, new = odd()
    whole = {name: drawn(new, name, one.shape) for name, one in module.named_parameters()}
    for name, one in whole.items():
        if not one.dim() or not module.get_parameter(name).is_meta:
            continue
        shards = []
        for part in torch.arange(len(one)).chunk(processes):
            rows = slice(int(part[0]), int(part[-1]) + 1)
            slices = (rows, *(slice(0, size) for size in one.shape[1:]))
            monkeypatch.setattr(new_weights, "pieces_of", lambda _, at=slices: [at_once(at)])
            shards.append(drawn(new, name, one[rows].shape))
        assert torch.equal(torch.cat(shards), one), name
        columns = (slice(0, len(one)), *(slice(1, size) for size in one.shape[1:]))
        monkeypatch.setattr(new_weights, "pieces_of", lambda _, at=columns: [at_once(at)])
        assert torch.equal(drawn(new, name, one[columns].shape), one[columns])


def test_a_shard_draws_the_blocks_that_it_touches(monkeypatch):
    monkeypatch.setattr(new_weights, "BLOCK", 64)
    with (recording := Recording()):
        layer = nn.Linear(16, 100, bias=False)
    new = NewWeights(recording, {"it": layer.weight})
    blocks, seed_of = [], new_weights._seed_of
    monkeypatch.setattr(new_weights, "_seed_of", lambda *of: blocks.append(of[2]) or seed_of(*of))
    held = at_once((slice(10, 19), slice(0, 16)))
    monkeypatch.setattr(new_weights, "pieces_of", lambda _: [held])
    drawn(new, "it", torch.Size((9, 16)))
    assert blocks == [2, 3, 4]  # numbers 160 to 304


def test_other_first_values_are_those_of_torch():
    module, new = odd()
    values = {name: drawn(new, name, one.shape) for name, one in module.named_parameters()}
    assert values["truncated"].abs().max() <= 0.6
    assert values["truncated"].std().item() == pytest.approx(0.31, abs=0.03)
    torch.testing.assert_close(values["orthogonal"] @ values["orthogonal"].T, torch.eye(8))
    torch.testing.assert_close(values["computed"], torch.arange(9.0))  # one draw, used twice
    assert torch.equal(values["copied"], values["truncated"] * 2)
    assert torch.equal(values["scaled"], torch.full((12, 3), 7.0))
    assert not values["embedding.weight"][2].any()
    assert values["embedding.weight"].std().item() == pytest.approx(1, abs=0.3)
    assert values["drawn_before"].std().item() == pytest.approx(3, abs=1)
    assert values["random"].isfinite().all()
    assert not values["reassigned.bias"].any()
    assert values["scalar"] == 2.5
    assert values["constant"].isnan().all()  # it keeps the values with which it was built
    assert torch.equal(module.constant, torch.full((3, 2), 5.0))
    assert torch.equal(module.steps, torch.arange(5))
    noise = new.value(module.noise, "noise")
    assert noise.min() >= 1
    assert noise.max() <= 2
    new.refuse_incomplete()


def test_a_weight_that_nothing_initialises_is_refused():
    with (recording := Recording()):
        weight = nn.Parameter(torch.empty(3))
        other = nn.Parameter(torch.empty(3))
        other.data.copy_(weight.data)
    for one in (weight, other):
        with pytest.raises(ModelError, match="nothing that was recorded gives it a value"):
            NewWeights(recording, {"it": one}).refuse_incomplete()


def test_a_constant_cannot_depend_on_a_weight():
    constant = torch.zeros(3)
    with Recording(), pytest.raises(NotImplementedError, match="into a constant"):
        constant.copy_(torch.empty(3).normal_())


def test_a_recorded_model_takes_no_memory():
    with (recording := Recording()):
        module = nn.Linear(1 << 20, 1 << 20)  # 4 TB
    assert module.weight.is_meta
    assert len(NewWeights(recording, dict(module.named_parameters()))._names) == 2
