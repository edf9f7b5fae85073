"""Promises 1, 2 and 6 with subwords: losses of any shape, exact resume, a transformers model."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import runs
from config.compose import load_config
from config.schema import ConfigError
from data.subwords import load_tokenizer
from model.gpt import GPT, GPTConfig
from runs import CONSTANT
from snapshot.disk.folder import read_json
from snapshot.disk.load import restore_weights
from subword_folders import foreign_folder

BPE = "data.tokenizer=bpe:300"
PROMPT = "The run goes\non, 日本 and naïve"


@pytest.fixture(scope="module")
def single(small, tmp_path_factory):
    """A run of one process; it prepares its text itself."""
    folder = tmp_path_factory.mktemp("bpe")
    words = [*small, BPE, *CONSTANT, f"run.dir={folder / 'run'}", f"data.cache_dir={folder}"]
    result = runs.train(*words, code=0)
    (folder / "said").write_text(result.stdout)
    return folder / "run"


def test_the_numbers_are_those_of_tokens_and_of_bytes(single):
    said = (single.parent / "said").read_text()
    state = read_json(runs.snapshot(single, 30) / "state.json")["data"]
    tokens, size = state["held_out_tokens"], state["held_out_bytes"]
    assert f" tokens, {tokens:,} held out" in said
    assert state["unit"] == "token"
    for record in runs.metrics(single, "eval"):
        expected = record["loss"] / math.log(2) * tokens / size
        assert record["bits_per_byte"] == pytest.approx(expected, rel=1e-12)
    loss, per_byte = (runs.metrics(single, "eval")[-1][name] for name in ("loss", "bits_per_byte"))
    assert f"held-out loss {loss:.4f}, {per_byte:.4f} bits per byte" in said
    assert f"held out  {loss:.4f} nats per token, {per_byte:.4f} bits per byte\n" in said
    assert "character," not in said.split("held out  ")[1]


def test_transformers_loads_it_with_the_same_tokens_and_logits(single):
    folder = runs.snapshot(single, 30)
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    ids = theirs(PROMPT)["input_ids"]
    assert ids == ours.encode(PROMPT).tolist()
    assert theirs.decode(ids) == ours.decode(ids) == PROMPT
    assert read_json(folder / "config.json")["eos_token_id"] == ours.end_of_text is not None

    shape = GPTConfig.read(read_json(folder / "config.json"))
    assert shape.vocab_size == len(theirs) == 300
    model = GPT(shape).eval()
    restore_weights(folder, model)
    inputs = torch.tensor([ids[-shape.block_size :]])
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder).eval()(inputs).logits
        assert (model(inputs) - expected).abs().max() < 1e-4
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}


@pytest.mark.thorough
def test_generated_text_stops_at_the_end_of_a_document(small, tmp_path):
    """Of documents of one letter, after which each ends."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "b"}\n' * 400)
    words = [*small, BPE, f"data.source={rows}", f"run.dir={tmp_path / 'run'}"]
    words += ["train.max_steps=60", "optim.learning_rate=0.01"]
    assert runs.train(*words).returncode == 0
    sample = [str(tmp_path / "run"), "--prompt", "b", "--length", "50", "--temperature", "0"]
    result = runs.run(runs.command(*sample, script="sample.py"), code=0)
    assert result.stdout == "b\n\n"  # the document, and the line's own end


def test_a_run_with_another_tokenizer_is_refused_and_it_is_named(single, small, tmp_path):
    run_dir = shutil.copytree(single, tmp_path / "run")
    for tokenizer in ("bpe:299", "char"):
        result = runs.train(
            *small, *CONSTANT, f"run.dir={run_dir}", f"data.tokenizer={tokenizer}", code=2
        )
        assert f"data.tokenizer: bpe:300 in the snapshot, {tokenizer} now" in result.stderr
        assert "text: " not in result.stderr


@pytest.mark.slow
def test_a_tokenizer_of_a_folder_is_trained_with(small, tmp_path):
    theirs = foreign_folder(tmp_path / "theirs")
    run_dir = tmp_path / "run"
    words = [*small, f"data.tokenizer={theirs}", f"run.dir={run_dir}", "train.max_steps=2"]
    runs.train(*words, code=0)
    folder = runs.snapshot(run_dir, 2)
    assert read_json(folder / "config.json")["vocab_size"] == 258
    loaded = AutoTokenizer.from_pretrained(folder)
    assert len(loaded) == 258
    assert loaded.chat_template == "{{ messages[0]['content'] }}"
    moved = theirs.rename(tmp_path / "moved")  # the folder may have another name elsewhere
    words[len(small)] = f"data.tokenizer={moved}"
    again = runs.train(*words[:-1], "train.max_steps=3", code=0)
    assert "step-00000002, the newest of this run" in again.stdout


@pytest.mark.parametrize("name", ["bpe:256", "bpe:2000000", "bpe:many", "bpe", "BPE:300"])
def test_a_size_that_no_vocabulary_has_is_refused(name):
    with pytest.raises(ConfigError) as caught:
        load_config([f"data.tokenizer={name}"])
    sentence = f"data.tokenizer={name} must be bpe:<size> with a size from 257"
    assert str(caught.value).startswith(sentence)


def test_a_tokenizer_that_is_nowhere_gets_a_sentence(small, tmp_path):
    result = runs.train(*small, f"data.tokenizer={tmp_path}", f"run.dir={tmp_path / 'run'}", code=2)
    assert f"={tmp_path} has no tokenizer.json. Write it again with" in result.stderr
    assert "Traceback" not in result.stderr
