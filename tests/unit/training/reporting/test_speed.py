"""Where the time of an attempt went; what a token costs, and the peak that it is compared to."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import families
import runs
from config.compose import load_config
from model.causal_lm import CausalLM, CausalLMConfig
from model.gpt import GPT, GPTConfig
from training.reporting.speed import (
    DATA,
    EVALUATION,
    PASSES,
    PHASES,
    SNAPSHOT,
    START,
    UPDATE,
    PhaseClock,
    speed_at_peak,
)

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
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA H100 80GB HBM3", "no", None),
        ("NVIDIA GeForce GT 710", "bf16", None),
    ],
)
def test_the_speed_at_the_peak_is_that_of_all_gpus(gpt, monkeypatch, name, precision, peak):
    config, cuda = load_config([f"data.block_size={LENGTH}"]), torch.device("cuda")
    accelerator = SimpleNamespace(device=cuda, mixed_precision=precision, num_processes=2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    expected = None if peak is None else 2 * peak / gpt.flops_per_token(LENGTH)
    assert speed_at_peak(gpt, config, accelerator) == expected
    accelerator.device = torch.device("cpu")
    assert speed_at_peak(gpt, config, accelerator) is None


@pytest.fixture
def clock(monkeypatch) -> PhaseClock:
    """A clock of which every reading is a second later."""
    seconds = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))
    return PhaseClock(5.0)


def test_every_second_is_in_one_phase(clock):
    for batch in clock.timed(["a", "b"]):
        assert batch in "ab"
        clock.enter(UPDATE)
        with clock.within(SNAPSHOT):
            pass
        clock.enter(EVALUATION)
    lines = clock.table()
    found = clock.seconds
    assert (found[START], found[DATA], found[PASSES]) == (6.0, 3.0, 2.0)
    assert (found[UPDATE], found[SNAPSHOT], found[EVALUATION]) == (4.0, 2.0, 2.0)
    assert [line.split("  ")[0] for line in lines] == [*PHASES, "all"]
    assert lines[-1].endswith("100.0%")


def test_the_table_of_a_run_is_its_wall_time(small, tmp_path):
    begun = time.monotonic()
    result = runs.train(*small, f"run.dir={tmp_path / 'run'}")
    seconds = time.monotonic() - begun
    assert result.returncode == 0, result.stderr
    rows = dict(
        re.findall(r"^(?:time)? +([a-z][a-z, ]+?) +([\d.]+) s +[\d.]+%$", result.stdout, re.M)
    )
    assert list(rows) == [*PHASES, "all"]
    total = float(rows.pop("all"))
    assert sum(map(float, rows.values())) == pytest.approx(total, abs=0.05 * len(PHASES))
    assert total - 0.05 <= seconds  # it is printed with one digit
    assert float(rows[PASSES]) > 0
