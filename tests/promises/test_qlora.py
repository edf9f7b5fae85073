"""Adapters around weights in four bits: every promise of adapters holds."""

from __future__ import annotations

import pytest
import torch

import families
import runs
from config.checks import problems
from config.schema import Config
from model.family import LanguageModel
from snapshot.named_model import find_model

pytest.importorskip("bitsandbytes")
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
"""Rows of whole blocks."""
NF4 = ("model.lora_rank=4", "model.frozen_dtype=nf4", "optim.learning_rate=0.01")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases") / "llama"
    return families.make("llama", folder, dtype="bfloat16", **WIDE)


@pytest.fixture(scope="module")
def words(small, base):
    """The overrides of a run of ten steps on four documents' worth of tokens a step."""
    return families.words(small, base, "train.max_steps=10", "snapshot.every=5", *NF4)


@pytest.fixture(scope="module")
def trained(words, tmp_path_factory):
    """A run on one process."""
    run_dir = tmp_path_factory.mktemp("qlora") / "run"
    result = runs.train(*words, "model.dropout=0.0", f"run.dir={run_dir}", code=0)
    assert "by model.lora_rank=4, kept in nf4" in result.stdout
    return run_dir


def adapted(folder) -> LanguageModel:
    return find_model(str(folder)).load().eval()


@pytest.mark.thorough
def test_a_merged_model_has_the_weights_of_the_base_itself(trained, base, tmp_path):
    """Not what they were quantized to, and neither have evaluate.py and sample.py."""
    whole = tmp_path / "whole"
    runs.run([*runs.MODULE, "merge", str(trained), str(whole)], code=0)
    merged, before = runs.tensors(whole), runs.tensors(base)
    adapters = runs.tensors(runs.snapshot(trained, 10))
    name = "model.layers.0.mlp.up_proj"
    low, high = (adapters[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    expected = before[f"{name}.weight"].float() + 2 * (high @ low)
    assert torch.allclose(merged[f"{name}.weight"], expected, atol=1e-6)
    ids = torch.randint(20, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (adapted(whole)(ids) - adapted(trained)(ids)).abs().max() < 1e-5


@pytest.mark.slow
def test_fsdp_in_fp16_is_refused(words, tmp_path):
    file = runs.rehearsal("fsdp_cpu.yaml", tmp_path, 2, mixed_precision="fp16")
    result = runs.launch(file, *words, f"run.dir={tmp_path / 'run'}")
    assert "model.frozen_dtype=nf4 is not supported in fp16 under FSDP" in result.stderr
    assert not (tmp_path / "run" / "snapshots").exists()


def test_frozen_weights_that_a_snapshot_holds_cannot_have_four_bits():
    config = Config()
    config.run.name, config.run.dir = "name", "out/name"
    config.model.frozen_dtype = "nf4"
    assert "model.frozen_dtype=nf4 has no effect: nothing is frozen" in problems(config)[0]
    config.model.pretrained, config.optim.freeze = "somewhere", ["*.h.0.*"]
    assert "needs adapters, because snapshots hold other frozen weights" in problems(config)[0]
