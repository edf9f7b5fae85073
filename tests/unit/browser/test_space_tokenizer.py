"""The page's tokenizers, in node: tokens and texts are those of the tokenizers library."""

from __future__ import annotations

import random
import sys
import unicodedata
from pydoc_data import topics

import pytest

from data.tokenizer import CharTokenizer
from spaces import in_node, random_model, space_of
from subword_folders import trained

TEXTS = 400
WORD = (
    "naïve café's we'll  don't I'M 1234½ x²\n\n\t"
    "日本語テキスト 🙂👩‍👩‍👧🇩🇪 é ñ \u00a0\u2028\u0085\ufeff\u180e"
)
WHITESPACE = " \n\r\t\v\f\u0085\u00a0\u1680\u2000\u2028\u2029\u202f\u205f\u3000\ufeff\u200b\x1c"
BLOCKS = [(0x20, 0x7F), (0, 0x250), (0x300, 0x370), (0x370, 0x3000), (0x3000, 0x9FFF)]
BLOCKS += [(0xA000, 0xD800), (0xE000, 0x10000), (0x1F000, 0x1FB00), (0x10000, 0x110000)]


def random_texts(seed: int) -> list[str]:
    """Texts of all scripts: runs of one block, of whitespace, of words, and what is between."""
    chosen = random.Random(seed)

    def part() -> str:
        kind = chosen.randrange(4)
        if kind == 0:
            return "".join(chosen.choices(WHITESPACE, k=chosen.randint(1, 4)))
        if kind == 1:
            begin = chosen.randrange(len(WORD))
            return WORD[begin : begin + chosen.randint(1, 12)]
        low, high = chosen.choice(BLOCKS)
        found = (chr(chosen.randrange(low, high)) for _ in range(chosen.randint(1, 6)))
        return "".join(one for one in found if unicodedata.category(one) != "Cs")

    texts = ["".join(part() for _ in range(chosen.randint(0, 12))) for _ in range(TEXTS)]
    return ["", " ", WORD, WORD * 3, *texts]


@pytest.fixture(scope="module", params=["small", "real"])
def subwords(request, tmp_path_factory):
    """A byte-level BPE tokenizer, and a Space with it."""
    real = "\n".join(topics.topics.values())[:200_000] + WORD * 50
    tokenizer = trained(300) if request.param == "small" else trained(2000, real)
    folder = tmp_path_factory.mktemp("subwords")
    model = random_model(folder / "model", tokenizer, n_layer=1, n_embd=8, n_head=2)
    return tokenizer, space_of(model, folder / "space")


def test_any_text_has_the_tokens_of_the_library(subwords):
    tokenizer, space = subwords
    texts = [*random_texts(1), "<|endoftext|>", f"a <|endoftext|>\n{WORD}"]
    found = in_node(space, *[("encode", text) for text in texts])
    for text, ids in zip(texts, found, strict=True):
        assert ids == tokenizer.encode(text).tolist(), repr(text)


def test_any_tokens_have_the_text_of_the_library(subwords):
    """Also tokens that are no text: halves of characters, and the end-of-text token."""
    tokenizer, space = subwords
    chosen = random.Random(2)
    tokens = range(tokenizer.vocab_size)
    lists = [chosen.choices(tokens, k=chosen.randint(0, 30)) for _ in range(TEXTS)]
    lists += [tokenizer.encode(text).tolist() for text in random_texts(3)[:100]]
    found = in_node(space, *[("decode", ids) for ids in lists])
    for ids, text in zip(lists, found, strict=True):
        assert text == tokenizer.decode(ids), ids
        assert text == "".join(tokenizer.decode_stream(ids)), ids
    assert in_node(space, ("vocabSize",)) == [tokenizer.vocab_size]


@pytest.mark.slow
def test_every_code_point_has_the_tokens_of_the_library(subwords):
    """Between letters and after a space: a character of another class would split other words."""
    tokenizer, space = subwords
    assigned = (chr(point) for point in range(sys.maxunicode + 1))
    texts = [f"a{one} {one}1" for one in assigned if unicodedata.category(one) not in ("Cs", "Cn")]
    found = in_node(space, *[("encode", text) for text in texts])
    expected = [tokenizer.encode(text).tolist() for text in texts]
    assert [text for text, one, two in zip(texts, found, expected, strict=True) if one != two] == []


@pytest.fixture(scope="module")
def characters(tmp_path_factory):
    """A tokenizer of characters, and a Space with it."""
    tokenizer = CharTokenizer("".join(sorted({*WORD, *WHITESPACE, *"0123_proto"})))
    folder = tmp_path_factory.mktemp("characters")
    model = random_model(folder / "model", tokenizer, n_layer=1, n_embd=8, n_head=2)
    return tokenizer, space_of(model, folder / "space")


def test_characters_have_the_tokens_and_texts_of_the_library(characters):
    tokenizer, space = characters
    chosen = random.Random(4)
    texts = ["".join(chosen.choices(tokenizer.characters, k=20)) for _ in range(TEXTS)]
    lists = [tokenizer.encode(text).tolist() for text in texts]
    assert in_node(space, *[("encode", text) for text in texts]) == lists
    assert in_node(space, *[("decode", ids) for ids in lists]) == texts


def test_an_unknown_character_is_named(characters):
    tokenizer, space = characters
    (answer,) = in_node(space, ("encode", "we'll ⚙ 🦀"))
    assert answer["error"].startswith("The character “⚙” (U+2699) is not among the ")
    assert f" {tokenizer.vocab_size} characters" in answer["error"]
