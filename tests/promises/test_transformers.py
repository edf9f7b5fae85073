"""Promise 6: every snapshot is a transformers model; promise 5: and nothing in it can execute."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer, pipeline

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


def test_a_snapshot_holds_safetensors_and_json_only(folder):
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    for path in folder.glob("*.safetensors"):
        assert path.read_bytes()[8:9] == b"{"
