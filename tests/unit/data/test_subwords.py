"""Tokenizers of subwords: exact, the same in transformers, and decoded while they arrive."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from data.chunks import Chunk
from data.errors import DataError
from data.subwords import (
    END_OF_TEXT,
    SubwordTokenizer,
    load_tokenizer,
    tokenizer_of,
    train_bpe,
)
from data.tokenizer import TOKENIZER_FILES, refuse_larger_than
from odd_texts import AWKWARD, SPACED, UNICODE
from saved_tokenizers import auto_tokenizer
from snapshot.disk.folder import read_json
from subword_folders import END, WORDS, foreign_folder, sentencepiece_folder, trained

BPE = trained()
LITERAL = st.sampled_from([END_OF_TEXT, "<|endof", "text|>", " ", "the run", "\n\n", "日", "🙂"])
TEXTS = st.one_of(UNICODE, SPACED, st.lists(LITERAL, max_size=9).map("".join))


@given(TEXTS)
@settings(max_examples=300, deadline=None)
def test_decoding_what_was_encoded_gives_the_text_byte_for_byte(text):
    ids = BPE.encode(text)

    assert BPE.decode(ids).encode() == text.encode()
    assert BPE.end_of_text not in ids.tolist()


@given(TEXTS)
@settings(max_examples=100, deadline=None)
def test_a_stream_yields_whole_characters_and_the_text(text):
    ids = BPE.encode(text).tolist()
    parts = list(BPE.decode_stream(iter(ids)))

    assert "".join(parts) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


@given(st.lists(st.integers(0, BPE.vocab_size - 1), max_size=60), st.integers(0, 60))
@settings(max_examples=300, deadline=None)
def test_a_stream_of_any_tokens_is_their_text(ids, at):
    """A model may generate half of a character, or bytes that are none."""
    assert "".join(BPE.decode_stream(iter(ids))) == BPE.decode(ids)
    before = BPE.decode(ids[:at])
    if not before.endswith("\ufffd"):
        rest = BPE.decode_stream(iter(ids[at:]), after=ids[:at])
        assert before + "".join(rest) == BPE.decode(ids)


def test_a_stream_shows_what_is_known_at_once():
    ids = iter(BPE.encode("the 日 run").tolist())
    stream = BPE.decode_stream(ids)

    assert next(stream).startswith("t")
    assert len(list(ids)) == len(BPE.encode("the 日 run")) - 1  # not one more was waited for


def test_a_stream_keeps_the_space_that_a_decoder_drops(tmp_path):
    llama = tokenizer_of(sentencepiece_folder(tmp_path))
    prompt, new = llama.encode("on"), llama.encode("the 日 on")
    assert llama.decode(new) == "the 日 on"

    assert "".join(llama.decode_stream(iter(new.tolist()))) == "the 日 on"
    assert "".join(llama.decode_stream(iter(new.tolist()), after=prompt.tolist())) == " the 日 on"


def test_a_text_of_few_pairs_has_fewer_tokens_and_the_256_bytes():
    tokenizer = trained(1000, "ab")

    assert tokenizer.vocab_size == 257
    assert tokenizer.decode(tokenizer.encode("日本")) == "日本"


def test_a_text_without_spaces_is_merged_in_pieces_and_others_as_gpt2_does():
    """Training on one word of 200,000 characters would take minutes, and on 3 MB hours."""
    words = trained(300)._rust.pre_tokenizer.pre_tokenize_str
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    usual = Path(__file__).read_text() + "  it's  \n\n  \t 1234 naïve 日本語 ...!?\r\n end   "
    assert words(usual) == gpt2(usual)
    dna = "".join(random.Random(1).choices("ACGT", k=200_000))
    assert max(len(word) for word, _ in words(dna + " " * 500 + "7" * 500)) <= 101  # a space before
    begun = time.process_time()
    tokenizer = train_bpe(400, [Chunk(dna, True, False)], len(dna))
    assert time.process_time() - begun < 10
    assert tokenizer.decode(tokenizer.encode(dna)) == dna


def test_an_end_of_text_follows_where_a_document_ends():
    first, second = BPE.encode("the run").tolist(), BPE.encode("is lost").tolist()

    documents = Chunk("the run", True, False), Chunk("is lost", False, False)
    rows = [BPE.encode_chunks(chunks) for chunks in (documents, [Chunk("is lost", True, False)])]

    end = BPE.end_of_text
    assert [row.tokens.tolist() for row in rows] == [[*first, end, *second], [*second, end]]
    assert [row.ends.tolist() for row in rows] == [[len(first) + 1], [len(second) + 1]]
    assert BPE.decode([BPE.end_of_text]) == END_OF_TEXT


def test_a_foreign_tokenizer_json_stays_as_it_is(tmp_path):
    folder = sentencepiece_folder(tmp_path / "theirs")
    tokenizer_of(folder).save(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_a_lone_surrogate_gets_a_sentence():
    with pytest.raises(DataError, match="cannot encode the text"):
        BPE.encode("a\udc80")


@pytest.mark.parametrize("text", [text for text in AWKWARD if END_OF_TEXT not in text])
def test_transformers_agrees_on_awkward_text(text, tmp_path):
    theirs, ids = auto_tokenizer(BPE, tmp_path), BPE.encode(text).tolist()

    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == text
    assert len(theirs) == BPE.vocab_size
    assert theirs.eos_token_id == BPE.end_of_text


def test_saving_and_loading_changes_nothing(tmp_path):
    BPE.save(tmp_path)
    loaded = load_tokenizer(tmp_path)

    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(TOKENIZER_FILES)
    assert isinstance(loaded, SubwordTokenizer)
    assert loaded.identity == BPE.identity
    assert loaded.end_of_text == BPE.end_of_text
    assert loaded.encode(WORDS).tolist() == BPE.encode(WORDS).tolist()


# A tokenizer that somebody else has made.


def test_a_foreign_tokenizer_adds_nothing_and_cuts_nothing(tmp_path):
    ours = tokenizer_of(foreign_folder(tmp_path))
    text = f"<s>a long text, and {END} of it"

    assert ours.decode(ours.encode(text)) == text
    assert len(ours.encode(text)) == len(text)  # bytes, and none of the special tokens
    assert ours.end_of_text == 257
    assert ours.vocab_size == 258


def test_a_foreign_tokenizer_is_saved_as_transformers_needs_it(tmp_path):
    content = read_json(foreign_folder(tmp_path / "theirs") / "tokenizer.json")
    ours = tokenizer_of(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()

    theirs = auto_tokenizer(ours, tmp_path / "ours")

    assert content["truncation"] is not None
    assert content["padding"] is not None
    expected = {**content, "truncation": None, "padding": None}
    assert read_json(tmp_path / "ours" / "tokenizer.json") == expected
    assert json.loads((tmp_path / "ours" / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "bos_token": "<s>",
        "chat_template": "{{ messages[0]['content'] }}",
    }
    assert theirs("a text", add_special_tokens=False)["input_ids"] == ours.encode("a text").tolist()
    assert len(theirs) == ours.vocab_size
    message = [{"role": "user", "content": "hello"}]
    assert theirs.apply_chat_template(message, tokenize=False) == "hello"
    assert load_tokenizer(tmp_path / "ours").identity == ours.identity


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"eos_token": None}, "needs an eos_token"),
        ({"eos_token": "<nowhere>"}, "needs an eos_token that its tokenizer.json has"),
    ],
)
def test_a_foreign_tokenizer_without_an_end_of_text_is_refused(tmp_path, settings, named):
    folder = foreign_folder(tmp_path, **settings)
    (folder / "special_tokens_map.json").unlink()

    with pytest.raises(DataError, match=named) as caught:
        tokenizer_of(folder)
    assert f"data.tokenizer={folder}" in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[" * 10**5, b"\xff", b'{"model": {"type": "X"}}']
)
def test_a_tokenizer_that_is_none_gets_a_sentence(tmp_path, content):
    (foreign_folder(tmp_path) / "tokenizer.json").write_bytes(content)

    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read"):
        tokenizer_of(tmp_path)


def test_a_vocabulary_larger_than_the_embedding_is_refused():
    refuse_larger_than(300, BPE, "bpe:300")
    refuse_larger_than(301, BPE, "bpe:300")
    with pytest.raises(DataError, match=r"data\.tokenizer=bpe:300 has 300 tokens.*has 299 rows"):
        refuse_larger_than(299, BPE, "bpe:300")
