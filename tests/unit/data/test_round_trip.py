"""A tokenizer that does not hold the text is reported, and has no bits per byte."""

from __future__ import annotations

import json
import random
import shutil

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.decoders import Metaspace

import chats
import evaluate as script
import families
import runs
import streams
import texts
import tokenizer_kinds
from data.subwords import SubwordTokenizer
from snapshot.disk.state import read_state

WORDS = ["the run ", "goes on.\n", "Größe ", "日本語 ", "  indented\n", "① ", "e\u0301 "]
TEXT = "".join(random.Random(2).choices(WORDS, k=10_000))  # some 60,000 characters


def ascii_only() -> SubwordTokenizer:
    """A tokenizer of SentencePiece without tokens for bytes: what is not a letter is unknown."""
    pieces = [
        ("<unk>", 0.0),
        ("</s>", -9.0),
        *((piece, -4.0) for piece in "▁abcdefghiklmnoprstuvx.\n"),
    ]
    rust = Tokenizer(models.Unigram(pieces, 0, False))
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = Metaspace()
    settings = {"eos_token": "</s>", "unk_token": "<unk>"}
    return SubwordTokenizer(rust.to_str().encode(), settings, "here")


def normalizing() -> SubwordTokenizer:
    """Bytes of a text after NFKC, which knows no circled digits."""
    rust = Tokenizer.from_buffer(chats.tokenizer()._content)
    rust.normalizer = normalizers.NFKC()
    return SubwordTokenizer(rust.to_str().encode(), {"eos_token": "<|im_end|>"}, "here")


def info_of(tmp_path, tokenizer: SubwordTokenizer, text: str):
    folder = tmp_path / "tokenizer"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    tokenizer.save(folder)
    (tmp_path / "a.txt").write_text(text)
    return texts.prepare(tmp_path / "a.txt", tmp_path / "cache", tokenizer=folder).info


@pytest.mark.parametrize("kind", tokenizer_kinds.ALL)
def test_a_tokenizer_that_holds_every_text_loses_nothing(tmp_path, kind):
    info = info_of(tmp_path, tokenizer_kinds.tokenizer(kind), TEXT)
    assert info.lost_in_words is None
    assert info.bits_per_byte(1.0) is not None


@pytest.mark.parametrize(
    ("tokenizer", "which"), [(ascii_only, "Göß日本語①\u0301"), (normalizing, "①e\u0301")]
)
def test_characters_that_the_tokens_do_not_hold_are_counted_and_named(tmp_path, tokenizer, which):
    info = info_of(tmp_path, tokenizer(), TEXT)
    lost = [character for character in which if character != "e"]
    count = sum(map(TEXT.count, lost)) + TEXT.count("e\u0301") * ("e" in which)
    assert count <= info.lost * len(TEXT) <= count + 1.1  # and the first space
    assert set(info.which) <= set(which)
    assert info.bits_per_byte(1.0) is None


def test_a_small_loss_is_named_and_leaves_bits_per_byte(tmp_path):
    info = info_of(tmp_path, normalizing(), "①" + "the run goes on\n" * 20_000)
    assert "0.000381 % of the characters are lost when decoded ('①')" in info.lost_in_words
    assert info.bits_per_byte(1.0) is not None


def test_held_out_rows_are_checked_also_from_the_cache(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    rows = [json.dumps({"text": TEXT[i : i + 50]}) for i in range(0, 20_000, 50)]
    (folder / "a.jsonl").write_text("\n".join(rows))
    for _ in range(2):
        found = streams.corpus(tmp_path, folder, tokenizer=ascii_only()).info
        assert found.lost_in_words is not None
        assert found.bits_per_byte(1.0) is None
    assert streams.corpus(tmp_path, folder).info.lost_in_words is None


def test_a_run_and_its_evaluation_say_it(small, tmp_path, capsys):
    folder = families.make("llama", tmp_path / "model")
    ascii_only().save(folder)
    (tmp_path / "a.txt").write_text(TEXT[:9000])
    own = [word for word in small if not word.startswith("model.n_")]
    words = [f"data.source={tmp_path / 'a.txt'}", f"model.pretrained={folder}", "train.max_steps=2"]
    run_dir = tmp_path / "run"
    result = runs.train(*own, *words, f"run.dir={run_dir}", f"data.cache_dir={tmp_path}", code=0)
    said = result.stdout + result.stderr
    assert "the tokenizer cannot represent all of this text" in said
    assert "bits per byte" not in said.replace("Bits per byte are left out", "")
    assert all("bits_per_byte" not in one for one in runs.metrics(run_dir, "eval"))
    facts = read_state(runs.snapshot(run_dir, 2)).data
    assert "of the characters are lost" in facts["lost"]
    assert "held_out_bytes" not in facts
    assert script.main([str(run_dir), "--cache-dir", str(tmp_path), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["bits_per_byte"], figures["lost"]) == (None, facts["lost"])
