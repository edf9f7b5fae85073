"""Processes that share each matrix compute the loss and the gradients of one that has it whole."""

from __future__ import annotations

import pytest

import families
from model.causal_lm import PACKING
from model.families import build_model
from process_groups import assert_equal_losses_and_gradients, measured
from snapshot.disk.model import model_config


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_family_has_the_loss_and_gradients_of_one_process(tmp_path, processes):
    content = measured("tensors", tmp_path, processes)
    assert content.keys() == {"gpt2", *(f"their {one}" for one in PACKING)}
    # transformers has no plan for its GPT-2 classes, and experts are not cut.
    assert [name for name, kinds in content.items() if not kinds] == ["their gpt2", "their mixtral"]
    assert_equal_losses_and_gradients(content)


@pytest.mark.parametrize("family", ["qwen3_moe", "phi", "gpt_oss", "bloom", "arcee"])
def test_only_measured_families_are_shared(family):
    """Others may have a norm of heads that is not in their plan, or experts."""
    small = {**families.ROTARY, "num_local_experts": 4, "pad_token_id": None}
    assert build_model(model_config({**small, "model_type": family}, family)).tensor_plan == {}
