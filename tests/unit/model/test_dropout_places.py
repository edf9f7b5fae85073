"""model.dropout: the probability at every place of any model, whatever its config.json lists."""

from __future__ import annotations

import pytest
import torch

import families
import runs
from model.causal_lm import CausalLM, CausalLMConfig

SIZES = {
    **{key: size for key, size in families.ROTARY.items() if key != "head_dim"},
    **dict.fromkeys(("n_embd", "d_model"), 32),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("n_head", "n_heads"), 4),
    "n_positions": 48,
    "ffn_dim": 64,
}
"""By the names of every family."""
BY_DEFAULT = ("gpt2", "gpt_bigcode", "opt", "seed_oss", "biogpt")
"""Families whose classes drop something where config.json says nothing."""
OTHERS = ("bloom", "falcon", "gpt_neox", "llama", "mixtral", "phi", "qwen3", "starcoder2")


@pytest.mark.parametrize("family", [*BY_DEFAULT, *OTHERS])
def test_a_config_without_the_entries_gets_the_asked_dropout(family):
    content = {"model_type": family, **SIZES}
    ids = torch.randint(families.VOCABULARY, (1, 16))
    for dropout in (0.0, 0.3):
        torch.manual_seed(5)
        model = CausalLM(CausalLMConfig.read(content, dropout)).train()
        assert torch.equal(model(ids), model(ids)) == (dropout == 0)


def test_a_model_that_has_no_dropout_refuses_one(small, monkeypatch, tmp_path):
    entries = {"model_type": "ernie4_5", **families.ROTARY}
    monkeypatch.setitem(families.FAMILIES, "ernie", entries)
    folder = families.make("ernie", tmp_path / "base")
    words = families.words(small, folder, "model.dropout=0.3", f"run.dir={tmp_path / 'run'}")
    result = runs.train(*words, code=2)
    assert "its config.json cannot be used: model.dropout=0.3 has no effect" in result.stderr
