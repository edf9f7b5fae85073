"""Mixtures of experts, and every family that is trained: planned, traced, sampled and resumed."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from transformers.utils import logging

import families
import plan
import runs
from model.families import build_model
from model.lora import Lora, LoraError
from planning.fake_trace import Shape, traced_update
from snapshot.disk.model import model_config

EVERY = {**families.FAMILIES, **families.OTHERS}
MIXTURES = ("mixtral", "qwen3 moe", "olmoe")
THOROUGH = pytest.mark.thorough
ON_A_CPU, ON_GPUS = Shape("cpu", "no"), Shape("cuda", "bf16", 2, 2)


def marks_of(family: str, shape: Shape) -> list[pytest.MarkDecorator]:
    """Two families are planned on a CPU at once, and in CI on GPUs, where more is planned."""
    if family not in ("mixtral", "falcon"):
        return [pytest.mark.slow]
    return [THOROUGH] if shape == ON_GPUS else []


def sizes_of(family: str):
    return replace(model_config(dict(EVERY[family]), family), block_size=16)


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        pytest.param(name, shape, marks=marks_of(name, shape))
        for name, shape in product(EVERY, (ON_A_CPU, ON_GPUS))
    ],
    ids=str,
)
def test_every_family_is_planned(family, shape):
    totals = traced_update(sizes_of(family), 1, shape).totals()
    weights = sum(one.numel() for one in build_model(sizes_of(family)).parameters())
    assert totals.sum(axis=1).max() > 3 * 4 * weights / shape.shards


def test_a_plan_prints_its_own_lines_alone(tmp_path, capfd):
    """Nothing of transformers: not that a call is deprecated, nor that entries are odd."""
    base = families.make("gpt2 other", tmp_path / "base")
    words = [f"model.pretrained={base}", "model.activation_checkpointing=true"]
    words += ["data.block_size=16", "train.global_batch_size=4", "--memory=1"]
    logging.set_verbosity_warning()
    capfd.readouterr()
    assert plan.main(words) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    assert printed.out.startswith("model     ")
    assert logging.get_verbosity() == logging.ERROR  # pytest does not capture its messages


@pytest.mark.slow
@pytest.mark.parametrize("family", EVERY)
def test_every_family_goes_through_all_commands(small, family, tmp_path):
    base, run_dir = families.make(family, tmp_path / "base"), tmp_path / "run"
    words = families.words(small, base, "snapshot.every=2", f"run.dir={run_dir}")
    for steps in (2, 4):
        result = runs.train(*words, f"train.max_steps={steps}", code=0)
    assert "step-00000002, the newest of this run" in result.stdout
    verified = runs.run([*runs.MODULE, "verify", str(run_dir)], code=0)
    assert "every hash right" in verified.stdout
    for script, more in (("sample.py", ["--length", "5"]), ("evaluate.py", [])):
        result = runs.run(runs.command(str(run_dir), *more, script=script), code=0)


def test_experts_get_no_adapters(small, tmp_path):
    """Naming them is refused."""
    blocks = build_model(sizes_of("mixtral")).blocks
    with pytest.raises(LoraError, match="'down_proj' is not a linear layer"):
        Lora(2, 4, ("q_proj", "down_proj")).of(blocks)
    base = families.make("mixtral", tmp_path / "base")
    words = families.words(small, base, "model.lora_rank=2", "train.max_steps=1")
    runs.train(*words, f"run.dir={tmp_path / 'run'}", code=0)
