"""Which matrices of a model of transformers several processes share, and of which models none."""

from __future__ import annotations

import pytest
from transformers import CONFIG_MAPPING

import families
from model.families import build_model
from model.tensor import TensorGroup
from process_groups import Group
from snapshot.disk.model import model_config

EVERY = {**families.FAMILIES, **families.OTHERS}


def model_of(family: str, **entries: object):
    return build_model(model_config({**EVERY.get(family, {}), **entries}, family))


def cut_along(model, processes: int) -> dict[str, int | None]:
    """By the name of a parameter of the last block, the dimension that is cut."""
    model.share_matrices(TensorGroup(Group(processes, 0)))
    model.mark_cuts()
    return {name: one.cut.dim for name, one in model.blocks[-1].named_parameters()}


def test_a_process_has_heads_channels_and_rows_of_the_vocabulary():
    model = model_of("qwen3")
    norms = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    norms |= {"input_layernorm.weight", "post_attention_layernorm.weight"}
    found = cut_along(model, 2)
    assert {name for name, dim in found.items() if dim is None} == norms
    assert {name for name, dim in found.items() if dim == 1} == {
        "self_attn.o_proj.weight",
        "mlp.down_proj.weight",
    }
    # A norm of heads has gradients of a process's own heads; one between layers has all.
    summed = {name for name, one in model.named_parameters() if one.cut.summed}
    assert {name.rpartition("self_attn.")[2] for name in summed} == {
        "q_norm.weight",
        "k_norm.weight",
    }
    assert len(model.get_input_embeddings().weight) == families.VOCABULARY // 2
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize(
    "entries",
    [
        {"model_type": "phi", "qk_layernorm": True},  # the plan lacks its norms of heads
        {"model_type": "gpt_oss"},  # its plan has the embedding alone
        {"model_type": "minicpm3"},  # a word that is not known here
        {"model_type": "bloom", "n_head": 4, "n_layer": 2},  # no plan
        *({"model_type": one} for one in ("mixtral", "qwen3_moe", "olmoe", "qwen2_moe")),
    ],
    ids=lambda entries: entries["model_type"],
)
def test_a_model_whose_plan_says_too_little_has_none(entries):
    small = {**families.ROTARY, "num_local_experts": 4, "pad_token_id": None, "kv_lora_rank": 16}
    small |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "q_lora_rank": 16}
    assert entries["model_type"] in CONFIG_MAPPING
    assert model_of("", **small, **entries).tensor_plan == {}


def test_an_input_is_entered_once_in_families_that_are_measured():
    assert "lm.model.layers.*.mlp" in model_of("llama").tensor_plan
    plan = model_of("", model_type="arcee", **families.ROTARY).tensor_plan
    assert plan["lm.model.layers.*.mlp.up_proj"] == "entry colwise"
    assert "lm.model.layers.*.mlp" not in plan


def test_heads_of_keys_are_counted():
    assert model_of("llama").config.head_counts == (4, 2)
    assert model_of("bloom").config.head_counts == (4,)
