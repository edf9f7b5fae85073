"""The character tokenizer, and the same one as transformers loads it."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import DataError
from data.tokenizer import TOKENIZER_FILES, CharTokenizer
from odd_texts import AWKWARD, SPACED, UNICODE
from saved_tokenizers import auto_tokenizer


def tokenizer_of(text):
    return CharTokenizer("".join(sorted(set(text))))


def test_tokens_are_numbered_in_code_point_order():
    tokenizer = tokenizer_of("zebra \U0001f600\u00e9A")
    assert tokenizer.characters == " Aaberz\u00e9\U0001f600"
    assert tokenizer.encode("A \U0001f600").tolist() == [1, 0, 8]


@pytest.mark.parametrize(("characters", "dtype"), [(1, "uint8"), (256, "uint8"), (257, "uint16")])
def test_tokens_have_the_smallest_type_that_holds_the_vocabulary(characters, dtype):
    tokenizer = CharTokenizer("".join(map(chr, range(0x400, 0x400 + characters))))
    tokens = tokenizer.encode(tokenizer.characters)
    assert tokens.dtype == np.dtype(dtype)
    assert tokens.tolist() == list(range(characters))


@pytest.mark.parametrize(
    ("text", "named"),
    [("ab\u65e5a\u672c", "U+65E5"), ("a\nb", "U+000A"), ("🙂", "U+1F642"), ("a\udc80", "U+DC80")],
)
def test_an_unknown_character_is_named(text, named):
    """Also what a terminal's broken bytes become in sys.argv: a lone surrogate."""
    with pytest.raises(DataError) as caught:
        tokenizer_of("ab").encode(text)
    assert f"({named}) is not among the 2 characters" in str(caught.value)


@pytest.mark.parametrize("text", AWKWARD)
def test_saving_and_loading_changes_nothing(text, tmp_path):
    tokenizer = tokenizer_of(text)
    tokenizer.save(tmp_path)
    loaded = CharTokenizer.load(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(TOKENIZER_FILES)
    assert (loaded.characters, loaded.dtype) == (tokenizer.characters, tokenizer.dtype)
    assert loaded.encode(text).tolist() == tokenizer.encode(text).tolist()


@given(st.one_of(UNICODE, SPACED, st.sampled_from(["".join(AWKWARD), *AWKWARD])))
@settings(max_examples=40, deadline=None)
def test_transformers_agrees_on_any_text(text):
    ours = tokenizer_of(text)
    with tempfile.TemporaryDirectory() as folder:
        theirs = auto_tokenizer(ours, Path(folder))
    ids = ours.encode(text).tolist()
    assert theirs(text)["input_ids"] == theirs.encode(text) == ids
    assert len(theirs) == ours.vocab_size
    assert ours.decode(ids) == text
    for skip in (False, True):
        assert theirs.decode(ids, skip_special_tokens=skip) == text


def test_transformers_refuses_an_unknown_character_too(tmp_path):
    theirs = auto_tokenizer(tokenizer_of("ab"), tmp_path)
    with pytest.raises(Exception, match="UNK"):
        theirs("abc")
