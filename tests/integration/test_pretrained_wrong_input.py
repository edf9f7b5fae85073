"""Wrong input about a model to begin from: a sentence with key, value and remedy, and code 2."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from transformers import AutoTokenizer

import families
import hubs
import real_models
import runs
from config.compose import load_config
from config.schema import ConfigError
from data.errors import DataError
from data.subwords import tokenizer_of
from model.causal_lm import CausalLMConfig
from snapshot.disk.checking import check_weights
from snapshot.disk.model import check_described, layout_for
from snapshot.errors import SnapshotError
from snapshot.named_model import open_base
from snapshot.start import Start
from training.run.text import tokenizer_of_run

REPO = "them/model"
BEGUN = Start(None, None, "")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return families.make("llama", tmp_path_factory.mktemp("base") / "llama")


def changed(base, folder, **entries):
    """A copy of a model with other entries in its config.json."""
    shutil.copytree(base, folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **entries}))
    return folder


CONFIGS = {
    "code of its own": (
        {"model_type": "nobody", "auto_map": {"AutoModel": "x.Y"}},
        "code of a repo is never executed",
    ),
    "layers of several sizes": (
        {
            "model_type": "gemma4_text",
            "architectures": None,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "its layers differ in size",
    ),
    "quantized": ({"quantization_config": {"bits": 4}}, "its weights are quantized"),
    "an unknown architecture": ({"model_type": "nobody"}, "does not know its model_type 'nobody'"),
    "no causal model": (
        {"architectures": ["LlamaForSequenceClassification"]},
        "not a causal language model of text",
    ),
    "an absurd size": ({"num_hidden_layers": 10**7}, "num_hidden_layers=1e+07, which no model has"),
    "an absurd width": ({"hidden_size": 10**10}, "hidden_size=1e+10, which no model has"),
    "no weights": ("model.safetensors", "has no weights as safetensors"),
    "no config": ("config.json", "has no config.json"),
    "a missing tensor": ({"num_hidden_layers": 3}, "it lacks model.layers.2."),
    "a surplus tensor": ({"num_hidden_layers": 1}, "it holds 'model.layers.1."),
    "another shape": ({"intermediate_size": 96}, "has the shape [64, 32], its config says"),
}


def refusal(folder) -> str:
    """What is said about a model, by all that a run checks before it trains."""

    def check() -> None:
        base = open_base("model.pretrained", str(folder), 5.0)
        check_weights(base.folder, base.key, base.config())

    with pytest.raises(SnapshotError) as refused:
        check()
    assert f"model.pretrained={folder}" in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_that_cannot_be_trained_is_refused(base, tmp_path, name):
    change, sentence = CONFIGS[name]
    folder = changed(base, tmp_path / "base", **(change if isinstance(change, dict) else {}))
    if isinstance(change, str):
        (folder / change).rename(folder / "pytorch_model.bin")
    assert sentence in refusal(folder)


def test_a_model_with_values_besides_its_parameters_is_refused():
    sizes = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "n_routed_experts": 4}
    config = CausalLMConfig.read({"model_type": "deepseek_v3", **sizes, **families.ROTARY})
    with pytest.raises(SnapshotError, match=r"parameters \(.*e_score_correction_bias\)"):
        check_described(layout_for(config))
    for family in families.FAMILIES.values():
        check_described(layout_for(CausalLMConfig.read(family)))


def test_a_tokenizer_in_older_files_is_refused_with_the_way_out(tmp_path, monkeypatch):
    """And what the sentence says to do helps."""
    folder = real_models.make("gpt2", tmp_path / "gpt2")
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in content["model"]["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    (folder / "tokenizer.json").unlink()
    before = [f"model.pretrained={folder}"]
    with pytest.raises(DataError) as refused:
        tokenizer_of_run(
            load_config(before), BEGUN, open_base("model.pretrained", str(folder), 5.0)
        )
    assert "has no tokenizer.json. Write it again with transformers: " in str(refused.value)
    assert "Then add data.tokenizer=tokenizer, or copy its files" in str(refused.value)
    with pytest.raises(DataError, match="Write it again with transformers"):
        tokenizer_of(folder)
    monkeypatch.chdir(tmp_path)
    advice = re.search(r"AutoTokenizer\..*?\.save_pretrained\(.*?\)", str(refused.value))
    eval(advice[0], {"AutoTokenizer": AutoTokenizer})
    found = tokenizer_of_run(load_config([*before, "data.tokenizer=tokenizer"]), BEGUN, None)
    assert tokenizer_of(found).end_of_text is not None


def test_a_repo_that_cannot_be_used_is_refused(base, near_hub):
    hubs.publish(near_hub, REPO, base)
    assert "nobody/nothing" in refusal("nobody/nothing")
    assert "v9" in refusal(f"{REPO}@v9")
    assert "neither a folder that exists nor a repo" in refusal("a/b/c")
    near_hub.create("me/empty")
    near_hub.create("me/gguf")
    near_hub.commit_files("me/gguf", {"model.gguf": b"GGUF"})
    for nothing in ("me/empty", "me/gguf"):
        assert "has no config.json: it is neither a model nor a run" in refusal(nothing)
    repo = near_hub.repo(REPO)
    repo.gated = True
    assert f"{REPO} is gated (HTTP 403): request access on its page" in refusal(REPO)
    repo.gated, repo.private = False, True
    assert f"there is no repo {REPO}, or the token may not see it (HTTP 404)" in refusal(REPO)


def test_nothing_is_downloaded_or_written_before_the_rest_is_right(small, base, tmp_path, hub):
    hubs.publish(hub, REPO, base)
    there = {**hub.environment(), "HF_HOME": str(tmp_path / "cache")}
    more = [f"run.dir={tmp_path / 'run'}", "data.block_size=64"]
    result = runs.train(*families.words(small, REPO, *more), **there, code=2)
    assert (
        f"data.block_size=64 is longer than the context of model.pretrained={REPO}" in result.stderr
    )
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert not list((tmp_path / "run").glob("snapshots/*"))


ARGUMENTS = {
    "model.pretrained=": "model.pretrained= is empty",
    "model.pretrained=a/b model.n_layer=3": "model.n_layer=3 has no effect",
    "model.pretrained=a/b model.architecture=x/y": "name two models",
    "model.lora_rank=4": "model.lora_rank=4 needs model.pretrained",
    "model.pretrained=a/b model.lora_rank=4 optim.freeze=[x]": "no effect with model.lora_rank=4",
    "model.pretrained=a/b model.lora_alpha=8": "model.lora_alpha=8 applies only to LoRA",
    "model=llama_tiny model.activation_function=gelu": "gelu has no effect with model=llama_tiny, ",
    "model=llama_tiny model.n_embd=12": "model.n_embd=12 has no effect with model=llama_tiny, ",
    "model=llama_tiny model.pretrained=a/b": "model=llama_tiny has no effect with model.pretrained",
    "model=llama_tiny model.architecture=a/b": "model=llama_tiny has no effect with model.arch",
    "model.architecture=llama_124m": "Write model=llama_124m instead",
    "model=llama_tiny optim.learning_rate=0": "optim.learning_rate=0.0 must be above 0.",
    "model=llama_tiny data.documents=conversations": "needs a tokenizer with a chat template",
}


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_arguments_that_do_not_fit_the_model_are_refused(arguments):
    with pytest.raises(ConfigError) as refused:
        load_config(arguments.split())
    (sentence,) = str(refused.value).splitlines()
    assert ARGUMENTS[arguments] in sentence
