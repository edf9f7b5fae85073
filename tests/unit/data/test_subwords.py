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

import tokenizer_kinds
from data.chunks import Chunk
from data.errors import DataError
from data.subwords import END_OF_TEXT, SubwordTokenizer, load_tokenizer, tokenizer_of, train_bpe
from data.tokenizer import TOKENIZER_FILES, refuse_larger_than
from odd_texts import AWKWARD, SPACED, UNICODE
from saved_tokenizers import auto_tokenizer
from snapshot.disk.folder import read_json
from subword_folders import END, WORDS, foreign_folder, trained

BPE = trained()
LITERAL = st.sampled_from([END_OF_TEXT, "<|endof", "text|>", " ", "the run", "\n\n", "日", "🙂"])
TEXTS = st.one_of(UNICODE, SPACED, st.lists(LITERAL, max_size=9).map("".join))


@given(TEXTS)
@settings(max_examples=300, deadline=None)
def test_decoding_what_was_encoded_gives_the_text_byte_for_byte(text):
    """Also as a stream, of whole characters."""
    ids = BPE.encode(text).tolist()
    assert BPE.decode(ids).encode() == text.encode()
    assert BPE.end_of_text not in ids
    parts = list(BPE.decode_stream(iter(ids)))
    assert "".join(parts) == text
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


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
    assert next(BPE.decode_stream(ids)).startswith("t")
    assert len(list(ids)) == len(BPE.encode("the 日 run")) - 1  # not one more was waited for


def test_a_stream_keeps_the_space_that_a_decoder_drops():
    llama = tokenizer_kinds.tokenizer("Llama 2")
    prompt, new = llama.encode("on").tolist(), llama.encode("the 日 on").tolist()
    assert "".join(llama.decode_stream(iter(new))) == llama.decode(new) == "the 日 on"
    assert "".join(llama.decode_stream(iter(new), after=prompt)) == " the 日 on"


def test_a_text_of_few_pairs_has_fewer_tokens_and_the_256_bytes():
    tokenizer = trained(1000, "ab")
    assert tokenizer.vocab_size == 257
    assert tokenizer.decode(tokenizer.encode("日本")) == "日本"


def test_a_text_without_spaces_is_merged_in_pieces_and_others_as_gpt2_does():
    """Training on one word of 200,000 characters would take minutes, and on 3 MB hours."""
    words = BPE._rust.pre_tokenizer.pre_tokenize_str
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
    assert BPE.decode([end]) == END_OF_TEXT


def test_a_lone_surrogate_gets_a_sentence():
    with pytest.raises(DataError, match="cannot encode the text"):
        BPE.encode("a\udc80")


def test_transformers_agrees_on_awkward_text(tmp_path):
    theirs = auto_tokenizer(BPE, tmp_path)
    assert (len(theirs), theirs.eos_token_id) == (BPE.vocab_size, BPE.end_of_text)
    for text in AWKWARD:
        if END_OF_TEXT not in text:
            ids = BPE.encode(text).tolist()
            assert theirs(text)["input_ids"] == ids, repr(text)
            assert theirs.decode(ids) == text, repr(text)


def test_saving_and_loading_changes_nothing(tmp_path):
    BPE.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(TOKENIZER_FILES)
    assert loaded.files() == BPE.files()
    assert (loaded.identity, loaded.end_of_text) == (BPE.identity, BPE.end_of_text)
    assert loaded.encode(WORDS).tolist() == BPE.encode(WORDS).tolist()


# A tokenizer that somebody else has made.


def test_a_foreign_tokenizer_adds_nothing_and_cuts_nothing(tmp_path):
    ours = tokenizer_of(foreign_folder(tmp_path))
    text = f"<s>a long text, and {END} of it"
    assert ours.decode(ours.encode(text)) == text
    assert len(ours.encode(text)) == len(text)  # bytes, and none of the special tokens
    assert (ours.end_of_text, ours.vocab_size) == (257, 258)


def test_a_foreign_tokenizer_is_saved_as_transformers_needs_it(tmp_path):
    content = read_json(foreign_folder(tmp_path / "theirs") / "tokenizer.json")
    ours, saved = tokenizer_of(tmp_path / "theirs"), tmp_path / "saved"
    saved.mkdir()
    theirs = auto_tokenizer(ours, saved)
    assert None not in (content["truncation"], content["padding"])
    expected = {**content, "truncation": None, "padding": None}
    assert read_json(saved / "tokenizer.json") == expected
    assert json.loads((saved / "tokenizer_config.json").read_text()) == {
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
    assert load_tokenizer(saved).identity == ours.identity
    (saved / "tokenizer.json").write_text(json.dumps(expected, indent=1))  # its bytes stay
    assert tokenizer_of(saved).files()["tokenizer.json"] == (saved / "tokenizer.json").read_bytes()


def test_two_special_words_may_have_one_number():
    content = json.loads(trained(300)._content)
    content["model"]["vocab"] |= {"</s>": 300, "<eos>": 300}
    settings = {"eos_token": "</s>", "additional_special_tokens": ["<eos>"]}
    assert SubwordTokenizer(json.dumps(content).encode(), settings, "it").end_of_text == 300


@pytest.mark.parametrize("end", [None, "<nowhere>"])
def test_a_foreign_tokenizer_without_an_end_of_text_is_refused(tmp_path, end):
    folder = foreign_folder(tmp_path, eos_token=end)
    (folder / "special_tokens_map.json").unlink()
    sentence = "needs an eos_token that its tokenizer.json has"
    with pytest.raises(DataError, match=f"data.tokenizer={folder} .*{sentence}"):
        tokenizer_of(folder)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[" * 10**5, b"\xff", b'{"model": {"type": "X"}}']
)
def test_a_tokenizer_that_is_none_gets_a_sentence(tmp_path, content):
    (foreign_folder(tmp_path) / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read"):
        tokenizer_of(tmp_path)


def test_a_vocabulary_larger_than_the_embedding_is_refused():
    for rows in (300, 301):
        refuse_larger_than(rows, BPE, "bpe:300")
    with pytest.raises(DataError, match=r"data\.tokenizer=bpe:300 has 300 tokens.*has 299 rows"):
        refuse_larger_than(299, BPE, "bpe:300")
