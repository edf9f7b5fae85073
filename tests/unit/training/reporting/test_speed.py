"""Model FLOP utilisation: what a token costs, and the peak that it is compared to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import families
from config.compose import load_config
from model.causal_lm import CausalLM, CausalLMConfig
from model.gpt import GPT, GPTConfig
from training.reporting.speed import published_peak, speed_at_peak

LENGTH = 32


def counted(model, vocabulary: int) -> float:
    """FLOP that torch counts in a forward and a backward pass, for a token."""
    ids = torch.randint(vocabulary, (2, LENGTH))
    with FlopCounterMode(display=False) as counter:
        model(ids, ids).backward()
    return counter.get_total_flops() / ids.numel()


@pytest.fixture
def gpt() -> GPT:
    return GPT(GPTConfig(300, LENGTH, n_layer=3, n_head=2, n_embd=320)).train()


def test_a_token_costs_what_torch_counts(gpt):
    """Up to the biases and norms, which are no products; the logits are computed twice here."""
    again = 2 * 300 * 320  # the checkpointed output layer
    assert gpt.flops_per_token(LENGTH) == pytest.approx(counted(gpt, 300) - again, rel=0.02)


def test_a_token_of_a_model_of_the_hub_costs_what_torch_counts():
    content = {**families.FAMILIES["llama"], "hidden_size": 128, "head_dim": 32}
    model = CausalLM(CausalLMConfig.read({**content, "intermediate_size": 512, "vocab_size": 600}))
    assert model.flops_per_token(LENGTH) == pytest.approx(counted(model, 600), rel=0.03)


def test_frozen_parameters_cost_less_and_a_mixture_is_unknown(gpt):
    every = gpt.flops_per_token(LENGTH)
    for parameter in gpt.transformer.h.parameters():
        parameter.requires_grad_(False)
    frozen = sum(map(torch.numel, gpt.transformer.h.parameters()))
    assert gpt.flops_per_token(LENGTH) == every - 2 * frozen
    mixture = CausalLM(CausalLMConfig.read(dict(families.FAMILIES["mixtral"])))
    assert mixture.flops_per_token(LENGTH) is None


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H200", "fp16", 989e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA H100 80GB HBM3", "no", None),
        ("NVIDIA GeForce GT 710", "bf16", None),
    ],
)
def test_the_peak_of_a_gpu_is_the_published_one(name, precision, peak):
    assert published_peak(name, precision) == peak


def test_the_speed_at_the_peak_is_that_of_all_processes(gpt, monkeypatch):
    config, cuda = load_config([f"data.block_size={LENGTH}"]), torch.device("cuda")
    accelerator = SimpleNamespace(device=cuda, mixed_precision="bf16", num_processes=2)
    for name, expected in (("NVIDIA L4", 2 * 121e12 / gpt.flops_per_token(LENGTH)), ("GT", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert speed_at_peak(gpt, config, accelerator) == expected
    accelerator.device = torch.device("cpu")
    assert speed_at_peak(gpt, config, accelerator) is None
