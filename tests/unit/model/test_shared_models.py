"""Processes that share sequences or matrices compute what one process computes that has all."""

from __future__ import annotations

import pytest

import families
from model.causal_lm import PACKING
from model.families import build_model
from process_groups import assert_equal_losses_and_gradients, measured
from snapshot.disk.model import model_config

CANNOT = {
    # Gemma has sliding windows.
    "contexts": ["their gemma2", "their gemma3_text"],
    # transformers has no plan for its GPT-2 classes; experts, and layers all of whose outputs a
    # process needs, are not cut.
    "tensors": ["their gpt2", "their mixtral", "their olmo2", "their phi3"],
}


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shared", CANNOT)
def test_every_family_has_the_loss_and_gradients_of_one_process(tmp_path, shared, processes):
    """Of four processes that share sequences, each of two heads of keys is in two."""
    content = measured(shared, tmp_path, processes)
    assert content.keys() == {"gpt2", *(f"their {one}" for one in PACKING)}
    assert [name for name, kinds in content.items() if not kinds] == CANNOT[shared]
    assert_equal_losses_and_gradients(content)


@pytest.mark.parametrize("family", ["qwen3_moe", "phi", "gpt_oss", "bloom", "arcee"])
def test_only_measured_families_are_shared(family):
    """Others may have a norm of heads that is not in their plan, or experts."""
    small = {**families.ROTARY, "num_local_experts": 4, "pad_token_id": None}
    assert build_model(model_config({**small, "model_type": family}, family)).tensor_plan == {}
