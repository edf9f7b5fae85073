"""Attention of our models on a CPU, by matrix products or by torch's kernel."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator

import model.attention
import runs
from config.compose import load_config
from config.schema import gpt_config
from model.attention import (
    KERNEL,
    LONGEST_PRODUCTS,
    PRODUCTS,
    Attend,
    attend_by_products,
    use_on_cpu,
)
from model.gpt import GPT, Attention, GPTConfig
from snapshot.disk.folder import read_json
from training.run.kernels import choose_attention

V = 31
LONGEST = {PRODUCTS: sys.maxsize, KERNEL: 0, None: LONGEST_PRODUCTS}
SHORT = [
    "train.max_steps=4",
    "snapshot.every=2",
    "snapshot.keep=4",
    "train.eval_every=4",
]


@pytest.fixture
def choice(small):
    """What an attempt computes attention by."""

    def choose(*words: str, step: int = 0, before: str | None = None) -> str | None:
        config = load_config([*small, *words])
        state = SimpleNamespace(attention=before, step=step)
        built = GPT(gpt_config(config, 31))
        choose_attention(Accelerator(cpu=True), config, built, state)
        assert built.blocks[0].attn.attend.longest_products == LONGEST[state.attention]
        return state.attention

    return choose


@pytest.fixture
def by_products(monkeypatch):
    """The queries of all attention that is computed by products."""
    taken = []

    def noted(query, *rest):
        taken.append(query)
        return attend_by_products(query, *rest)

    monkeypatch.setattr(model.attention, "attend_by_products", noted)
    return taken


@pytest.mark.parametrize(("dtype", "nearly"), [(torch.float32, 1e-6), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("time", [2, 64, 300, LONGEST_PRODUCTS])
def test_attention_by_scores_is_torchs_own(dtype, nearly, time):
    generator = torch.Generator().manual_seed(3)
    parts = [torch.randn(2, 3, time, 8, generator=generator).requires_grad_() for _ in range(3)]
    upstream = torch.randn(2, 3, time, 8, generator=generator)
    ours = attend_by_products(*(part.to(dtype) for part in parts)).float()
    theirs = F.scaled_dot_product_attention(*(part.double() for part in parts), is_causal=True)
    results = [(one, *torch.autograd.grad(one, parts, upstream)) for one in (ours, theirs.float())]

    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=nearly, atol=nearly)


def test_dropout_drops_and_scales_the_weights():
    """Values that are units show the weights themselves."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 3, 16, 16)
    value = torch.eye(16).expand(4, 3, 16, 16)
    exact = attend_by_products(query, key, value)
    dropped = attend_by_products(query, key, value, 0.25)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], exact[kept] / 0.75)
    assert kept[exact > 0].float().mean() == pytest.approx(0.75, abs=0.05)


@pytest.mark.parametrize(
    ("way", "time", "expected"),
    [
        (None, LONGEST_PRODUCTS, True),
        (None, LONGEST_PRODUCTS + 1, False),
        (PRODUCTS, LONGEST_PRODUCTS + 1, True),
        (KERNEL, 8, False),
        (None, 1, False),  # one new position sees all
        (PRODUCTS, 1, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_by_products_where_asked_for_or_faster(
    by_products, dtype, way, time, expected
):
    attention = Attention(GPTConfig(V, time, 1, 2, 16), 0).to(dtype)
    use_on_cpu(attention, way)
    attention(torch.zeros(1, time, 16, dtype=dtype))
    assert bool(by_products) == expected


def test_another_device_has_torchs_kernel(by_products):
    query, key, value = torch.empty(3, 2, 2, 8, 4, device="meta")
    Attend()(query, key, value, is_causal=True)
    assert not by_products


def test_a_new_run_takes_products_and_a_resumed_one_keeps_its_choice(choice):
    assert choice() == PRODUCTS
    assert choice("run.attention=kernel") == KERNEL
    assert choice(step=10, before=KERNEL) == KERNEL
    assert choice(step=10, before=None) is None  # it began on a GPU
    assert choice("run.attention=kernel", step=10, before=PRODUCTS) == KERNEL


def test_long_sequences_are_left_to_torchs_kernel(choice):
    assert choice("data.block_size=513") is None
    assert choice("data.block_size=513", "run.attention=products") == PRODUCTS


def test_a_resume_keeps_the_way_that_the_run_began_with(small, tmp_path):
    """As on another processor, where a new run would choose the other."""
    config = runs.rehearsal("ddp_cpu.yaml", tmp_path, 2)

    def train(name: str, *words: str) -> Path:
        run_dir = f"run.dir={tmp_path / name}"
        assert runs.launch(config, *small, *SHORT, *words, run_dir).returncode == 0
        return tmp_path / name

    undisturbed = train("undisturbed", "run.attention=kernel")
    shutil.copytree(undisturbed, tmp_path / "moved")
    shutil.rmtree(runs.snapshot(tmp_path / "moved", 4))
    moved, fresh = train("moved"), train("fresh")

    ways = [read_json(runs.snapshot(run, 4) / "state.json")["attention"] for run in (moved, fresh)]
    assert ways == [KERNEL, PRODUCTS]
    runs.assert_same_bits(runs.snapshot(undisturbed, 4), runs.snapshot(moved, 4))
    bits = [runs.tensors(runs.snapshot(run, 4)) for run in (undisturbed, fresh)]
    assert not all(bits[0][name].equal(bits[1][name]) for name in bits[0])
