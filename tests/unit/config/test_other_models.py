"""What a run of a model that is not our own GPT begins from."""

from __future__ import annotations

import shutil

import pytest
import torch

import families
from config import compose
from config.compose import load_config
from config.other_models import rate_by_size, settle_rate
from config.schema import ConfigError
from model.causal_lm import CausalLMConfig
from snapshot.disk.model import layout_for
from training.step import learning_rate_at


@pytest.mark.parametrize("key", ["model.pretrained", "model.architecture"])
def test_it_does_not_begin_from_the_preset_of_our_own(key):
    config = load_config([f"{key}=owner/name"])
    assert (config.optim.name, config.optim.learning_rate) == ("adamw", 0)
    assert config.train.max_steps == {"pretrained": 1000, "architecture": 2000}[key[6:]]
    own = load_config([])
    assert (own.optim.name, own.train.max_steps) == ("muon", 1200)


def test_what_is_given_wins_over_the_recipe():
    words = ["optim.learning_rate=0.02", "model.architecture=a/b", "optim.name=muon"]
    config = load_config([*words, "train.max_steps=7", "optim.min_learning_rate=0.01"])
    settle_rate(config, lambda: pytest.fail("the size is not asked for"))
    optim = config.optim
    assert (optim.name, optim.learning_rate, config.train.max_steps) == ("muon", 0.02, 7)
    config = load_config(["experiment=finetune_gpt2", "model.pretrained=a/b", "data.source=x"])
    assert config.optim.learning_rate == 3e-5


@pytest.mark.parametrize(
    ("words", "parameters", "rate"),
    [
        (["model.architecture=a/b"], 8_000_000_000, 1.2e-4),
        (["model.architecture=a/b"], 124_000_000, 6e-4),
        (["model.pretrained=a/b"], 8_000_000_000, 1.2e-5),
        (["model.pretrained=a/b"], 500_000_000, 3e-5),
        (["model.pretrained=a/b", "model.lora_rank=8"], 8_000_000_000, 1.2e-4),
        (["model.architecture=a/b"], 10**12, 1e-4),
    ],
)
def test_its_rate_is_one_for_its_size(words, parameters, rate):
    config = load_config(words)
    assert rate_by_size(config, parameters) == rate
    settle_rate(config, lambda: parameters)
    assert learning_rate_at(100, config.optim, 100_000) <= rate == config.optim.learning_rate


@pytest.mark.parametrize("tied", [True, False])
def test_its_size_does_not_count_the_output_layer(tied):
    sizes = CausalLMConfig.read({**families.FAMILIES["llama"], "tie_word_embeddings": tied})
    both = layout_for(sizes).parameters()
    own = 0 if tied else families.VOCABULARY * sizes.n_embd
    assert layout_for(sizes).size_without_output() == sum(map(torch.numel, both.values())) - own


def test_a_model_that_an_experiment_names_has_its_recipe_too(monkeypatch, tmp_path):
    monkeypatch.setattr(
        compose, "CONFIG_DIR", shutil.copytree(compose.CONFIG_DIR, tmp_path / "config")
    )
    own = "# @package _global_\nmodel:\n  pretrained: a/b\n"
    (tmp_path / "config" / "experiment" / "own.yaml").write_text(own)
    assert load_config(["experiment=own"]).optim.name == "adamw"
    assert load_config(["model.pretrained=NULL"]).optim.name == "muon"


def test_an_optimizer_that_the_rates_are_not_of_needs_one():
    config = load_config(["model.pretrained=a/b", "optim.name=muon"])
    with pytest.raises(ConfigError, match=r"name=muon needs an explicit optim\.learning_rate"):
        settle_rate(config, lambda: 1000)


def test_a_lowest_rate_above_that_of_the_size_is_refused():
    config = load_config(["model.pretrained=a/b", "optim.min_learning_rate=1e-3"])
    with pytest.raises(ConfigError, match=r"min_learning_rate=0\.001 must be at most .* 1\.2e-05"):
        settle_rate(config, lambda: 8_000_000_000)
    with pytest.raises(ConfigError, match="must be above 0"):
        load_config(["optim.learning_rate=0"])
