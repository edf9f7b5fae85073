"""How a CPU computes attention: by a rule, equal on all processes, kept by every restart."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.nn.functional as F
from accelerate import Accelerator

import runs
import training.run.tuning
from config.compose import load_config
from config.schema import ConfigError, gpt_config
from model.cpu.layers import KERNEL, PRODUCTS, attends_as_torch
from model.family import Attend
from model.gpt import GPT
from snapshot.disk.files import read_json
from training.run.tuning import choose_attention, usually_faster

SHORT = [
    "train.max_steps=4",
    "snapshot.every=2",
    "snapshot.keep=4",
    "train.eval_every=4",
]


@pytest.fixture
def choice(small):
    """What an attempt computes attention by, in float32."""

    def choose(*words: str, step: int = 0, before: str | None = None) -> str | None:
        config = load_config([*small, *words])
        state = SimpleNamespace(attention=before, step=step)
        choose_attention(Accelerator(cpu=True), config, GPT(gpt_config(config, 31)), state)
        return state.attention

    return choose


@pytest.mark.parametrize(
    ("precision", "has_bf16", "way"),
    [
        ("no", False, PRODUCTS),
        ("no", True, PRODUCTS),
        ("bf16", True, PRODUCTS),
        ("bf16", False, KERNEL),
    ],
)
def test_only_emulated_bf16_is_left_to_torchs_kernel(monkeypatch, precision, has_bf16, way):
    monkeypatch.setattr(training.run.tuning, "cpu_has_bf16", lambda: has_bf16)
    assert usually_faster(precision) == way


def test_a_new_run_chooses_and_a_resumed_one_keeps_its_choice(choice):
    assert choice() == PRODUCTS
    assert choice("run.attention=kernel") == KERNEL
    assert choice(step=10, before=KERNEL) == KERNEL
    assert choice(step=10, before=None) is None  # a snapshot of an older version
    assert choice("run.attention=kernel", step=10, before=PRODUCTS) == KERNEL


def test_a_changed_attention_is_computed_as_it_says(choice, monkeypatch):
    """Products would leave the change out without a word."""

    def uniform(self, query, key, value, rows=None, **options):
        return F.scaled_dot_product_attention(0 * query, key, value, **options)

    monkeypatch.setattr(Attend, "forward", uniform)
    attends_as_torch.cache_clear()
    try:
        assert choice() == KERNEL
        assert choice(step=10, before=None) == KERNEL
        with pytest.raises(ConfigError, match=r"Attend .* run\.attention=kernel"):
            choice(step=10, before=PRODUCTS)
    finally:
        attends_as_torch.cache_clear()


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
