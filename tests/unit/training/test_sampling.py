"""Samples in training: where they end, and how long they may take."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

import chats
import families
import runs
import subword_folders
from model.gpt import GPT, GPTConfig
from training import evaluation
from training.run.pretrained import generation


@pytest.fixture
def drawn(monkeypatch):
    """Draws a sample in which the model generates these tokens."""
    tokenizer = subword_folders.trained(300)
    model = GPT(GPTConfig(vocab_size=300, block_size=8, n_layer=1, n_head=1, n_embd=4))
    beginning = tokenizer.encode("\n")
    corpus = SimpleNamespace(
        tokenizer=tokenizer, prompt=lambda: beginning, marks=frozenset(), ends=frozenset()
    )

    def draw(tokens: list[int]) -> str:
        made = (torch.tensor([one]) for one in tokens)
        monkeypatch.setattr(evaluation, "generate", lambda *_, **__: made)
        return evaluation.sample_text(Accelerator(cpu=True), model, corpus, seed=1)

    return tokenizer, draw


def test_a_packed_sample_ends_where_the_model_ends_its_text(drawn):
    tokenizer, draw = drawn
    before, after = tokenizer.encode("the run").tolist(), tokenizer.encode("goes on").tolist()
    assert draw([*before, tokenizer.end_of_text, *after]) == "the run"


def test_a_packed_sample_ends_where_the_model_s_files_say(small, tmp_path):
    """At each end that generation_config.json names, as transformers does."""
    end = 290  # the tokenizer has another one
    base = families.make("gpt2", tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    tensors["transformer.ln_f.weight"].zero_()
    tensors["transformer.ln_f.bias"].fill_(1)
    tensors["transformer.wte.weight"][end] = 10  # so the model writes nothing else
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    words = [word for word in small if not word.startswith(("model.n_", "optim."))]
    words += [f"model.pretrained={base}", "train.max_steps=1", "train.sample_every=1"]
    words += ["optim.learning_rate=1e-9", "optim.min_learning_rate=0"]
    result = runs.train(*words, f"run.dir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    assert [one["text"] for one in runs.metrics(tmp_path / "run", "sample")] == [""]


def test_a_sample_that_takes_too_long_ends(drawn, monkeypatch):
    monkeypatch.setattr(evaluation, "MOST_SECONDS", 0.0)
    tokenizer, draw = drawn
    tokens = tokenizer.encode("the run").tolist()
    assert draw(tokens) == tokenizer.decode(tokens[:1])


def test_a_chat_model_stops_elsewhere_where_its_template_does(tmp_path):
    tokenizer = chats.tokenizer(chats.CHATML, end="</s>")
    ids = tokenizer.marks
    corpus = SimpleNamespace(
        tokenizer=tokenizer, marks=frozenset(ids.values()), info=SimpleNamespace(name="chats")
    )
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7, "custom_generate": "x"}')
    base = SimpleNamespace(base=SimpleNamespace(folder=tmp_path))
    ends = generation(base, corpus)
    assert ends == {"eos_token_id": [7, *sorted([ids["</s>"], ids["<|im_end|>"]])]}
    plain = SimpleNamespace(**vars(corpus) | {"marks": frozenset()})
    assert generation(base, plain) == {"eos_token_id": 7}
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text('{"eos_token_id": 9, "pad_token_id": null, "x": 1}')
    assert generation(base, corpus)["eos_token_id"][0] == 9  # which the new file would replace
    assert generation(base, plain) == {}
    assert generation(None, plain) == {}
