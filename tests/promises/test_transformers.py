"""Promise 6: every snapshot is a transformers model; promise 5: and nothing in it can execute."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import runs
from data.tokenizer import CharTokenizer
from model.generate import generate
from model.gpt import GPT, GPTConfig
from snapshot.disk.folder import read_json
from snapshot.disk.load import restore_weights

PROMPT = "The run goes\non"


@pytest.fixture(scope="module")
def folder(finished_run):
    return runs.snapshot(finished_run, 30)


@pytest.fixture(scope="module")
def ours(folder) -> GPT:
    model = GPT(GPTConfig.read(read_json(folder / "config.json"))).eval()
    restore_weights(folder, model)
    return model


def test_logits_are_those_of_transformers(folder, ours):
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.randint(ours.config.vocab_size, (4, ours.config.block_size))
    with torch.no_grad():
        difference = (ours(ids) - theirs(ids).logits).abs().max().item()
    print(f"largest difference of logits: {difference:.1e}")
    assert difference < 1e-4


def test_the_trained_weights_are_all_there(folder):
    _, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert not loading["mismatched_keys"]


def test_greedy_text_is_the_same(folder, ours):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    speak = pipeline("text-generation", model=str(folder), tokenizer=tokenizer)
    theirs = speak(PROMPT[:6], max_new_tokens=10, do_sample=False)[0]["generated_text"]
    own = CharTokenizer.load(folder)
    ids = torch.from_numpy(own.encode(PROMPT[:6]).astype("int64"))[None]
    drawn = generate(ours, ids, 10, temperature=0)
    assert theirs == PROMPT[:6] + own.decode([int(token) for token in drawn])


def test_tokens_are_the_same(folder):
    theirs, own = AutoTokenizer.from_pretrained(folder), CharTokenizer.load(folder)
    assert theirs(PROMPT)["input_ids"] == own.encode(PROMPT).tolist()
    assert theirs.decode(own.encode(PROMPT).tolist()) == PROMPT


@pytest.mark.slow
def test_compiled_training_gives_the_same_names(small, finished_run, tmp_path):
    runs.train(
        *small,
        "model.dropout=0.1",
        f"run.dir={tmp_path / 'run'}",
        "train.max_steps=2",
        ACCELERATE_DYNAMO_BACKEND="EAGER",
        code=0,
    )
    names = runs.tensors(runs.snapshot(tmp_path / "run", 2)).keys()
    assert names == runs.tensors(runs.snapshot(finished_run, 30)).keys()


def test_a_snapshot_holds_safetensors_and_json_only(folder):
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    for path in folder.glob("*.safetensors"):
        assert path.read_bytes()[8:9] == b"{"
