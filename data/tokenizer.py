"""Tokenizers: the interface of all of them, and the tokenizer of characters.

`CharTokenizer` has one token for each code point of the corpus. It writes its vocabulary as a
`tokenizers` file, which transformers' AutoTokenizer loads. Subwords: data/subwords.py.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from data.chunks import Chunk
from data.errors import DataError
from data.token_file import TokenRows

CODE_POINTS = 0x110000
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
KEY = "data.tokenizer="
FIXED_SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",  # loads tokenizer.json as it is
    "clean_up_tokenization_spaces": False,
}
NOT_A_CHARACTER = "\ufffd"
"""What a decoder writes for bytes that are not UTF-8, such as half of a character."""
MOST_WAITING = 64
"""Tokens that a stream holds back because they do not end with a whole character."""
COMPARED_CHARACTERS, SHOWN = 1 << 18, 6
"""How much of a text is compared with what its tokens say, and how many characters are named."""
CHARACTERS = "char"
"""The `data.tokenizer` of characters."""
SMALLEST_BPE, LARGEST_BPE = 257, 1_000_000
"""Sizes of a trained vocabulary; the smallest has the 256 bytes and the end-of-text token."""
OF_BYTES = f"bpe:{SMALLEST_BPE}"
"""The tokenizer of these, which is the same for every text."""


def code_points(text: str) -> NDArray[np.int64]:
    """The code points of a text, computed without a Python loop over its characters.

    As int64, numpy's index type: any other type would be converted at each lookup.
    """
    # Lone surrogates, which broken bytes on a command line become, are unknown code points.
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    return points.astype(np.int64)


def smallest_unsigned(count: int) -> np.dtype:
    """The smallest unsigned integer type with at least `count` values."""
    return np.min_scalar_type(max(count - 1, 0))


def bpe_size(name: str) -> int | None:
    """The size that a `data.tokenizer` of the form bpe:<size> asks for; None for any other."""
    match = re.fullmatch(r"bpe:([0-9]{1,9})", name)
    return int(match[1]) if match else None


def written_again(value: str) -> str:
    """How transformers writes a tokenizer of any kind; `value` is where it finds it."""
    return (
        "Write it again with transformers: "
        f"AutoTokenizer.from_pretrained({value.removeprefix(KEY)!r}).save_pretrained('tokenizer'). "
        f"Then add {KEY}tokenizer, or copy its files into the folder of the model."
    )


def lacks_file(where: str, value: str) -> str:
    """The mistake of a folder or repo without a tokenizer.json, and the way out.

    `where` is key and value, `value` what transformers is given to find it.
    """
    return f"{where} has no {TOKENIZER_FILES[0]}. {written_again(value)}"


class Tokenizer(ABC):
    """Text to token ids and back."""

    unit = "token"
    """The name of a token in messages."""
    vocab_size: int
    """One more than the largest id."""
    dtype: np.dtype
    """The smallest unsigned integer type for the ids."""
    end_of_text: int | None = None
    """The token after each document; None if documents follow each other without one."""

    @property
    @abstractmethod
    def identity(self) -> bytes:
        """What the fingerprint of a text begins with: it differs if any encoding may differ."""

    @property
    @abstractmethod
    def beginning(self) -> str:
        """The default prompt."""

    @property
    def before_text(self) -> list[int]:
        """The tokens that transformers puts before a prompt."""
        return []

    @abstractmethod
    def encode(self, text: str) -> NDArray:
        """Token ids (T,) of `dtype`, none added. Raises DataError if the text has no encoding."""

    @abstractmethod
    def encode_chunks(self, chunks: Sequence[Chunk]) -> TokenRows:
        """The tokens of chunks. An end-of-text token follows each document, if there is one.

        Raises DataError as `encode`.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int] | NDArray) -> str:
        """The text of token ids."""

    def decode_stream(self, ids: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:
        """Yield the text of ids while they arrive, in whole characters; they follow `after`.

        Joined, it is what decoding all at once gives. A token may be a part of a character, and
        some decoders drop the space before the first token: so what is new is what the text of the
        tokens before does not have.
        """
        before: list[int] = list(after)[-MOST_WAITING:]
        waiting: list[int] = []
        for token in ids:
            waiting.append(token)
            known, text = self.decode(before), self.decode(before + waiting)
            if text.endswith(NOT_A_CHARACTER) and len(waiting) < MOST_WAITING:
                continue
            yield text[len(known) :]
            before, waiting = waiting, []
        if waiting:
            yield self.decode(before + waiting)[len(self.decode(before)) :]

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """The files that AutoTokenizer reads, `TOKENIZER_FILES`, by name."""

    def save(self, folder: Path) -> None:
        """Write its files."""
        for name, content in self.files().items():
            (folder / name).write_bytes(content)


def lost_in(texts: Iterable[str], tokenizer: Tokenizer) -> tuple[float, str]:
    """Which share of the first characters of a text its tokens do not hold, and some of them.

    Normalizers change characters, and a token for what is unknown stands for any. A model of such
    tokens never sees the text, so its bits per byte would be those of another one.
    """
    text = "".join(islice(chain.from_iterable(texts), COMPARED_CHARACTERS))
    before, after = Counter(text), Counter(tokenizer.decode(tokenizer.encode(text)))
    changed = before - after or after - before
    which = "".join(character for character, _ in changed.most_common(SHOWN))
    return changed.total() / max(1, len(text)), which


def refuse_larger_than(rows: int, tokenizer: Tokenizer, name: str) -> None:
    """Raise DataError if a tokenizer has ids beyond an embedding of so many rows.

    A smaller vocabulary is fine. `name` is the value of `data.tokenizer`.
    """
    if tokenizer.vocab_size > rows:
        raise DataError(
            f"data.tokenizer={name} has {tokenizer.vocab_size:,} tokens, but the embedding of the "
            f"model has {rows:,} rows. Use the model's own tokenizer, or one with at most "
            f"{rows:,} tokens."
        )


class CharTokenizer(Tokenizer):
    """Token i is the i-th character of `characters`, which are in code-point order."""

    unit = "character"

    def __init__(self, characters: str) -> None:
        assert list(characters) == sorted(set(characters)), "characters in order, each once"
        self.characters = characters
        points = code_points(characters)
        self.vocab_size = len(characters)
        self.dtype = smallest_unsigned(len(characters))
        self._known = np.zeros(CODE_POINTS, dtype=bool)
        self._known[points] = True
        self._token_of = np.zeros(CODE_POINTS, dtype=self.dtype)
        self._token_of[points] = np.arange(len(points), dtype=self.dtype)

    @property
    def identity(self) -> bytes:
        return self.characters.encode()

    @property
    def beginning(self) -> str:
        """A newline, or the first character if there is none."""
        return "\n" if "\n" in self.characters else self.characters[0]

    def encode(self, text: str) -> NDArray:
        """Encode a text. DataError names the first character that the vocabulary lacks."""
        points = code_points(text)
        known = self._known[points]
        if not known.all():
            character = text[int(np.argmin(known))]
            raise DataError(
                f"the character {character!r} (U+{ord(character):04X}) is not among the "
                f"{self.vocab_size} characters of the training text. Leave it out."
            )
        return self._token_of[points]

    def encode_chunks(self, chunks: Sequence[Chunk]) -> TokenRows:
        ends = np.cumsum([len(chunk.text) for chunk in chunks])
        is_end = [chunk.ends_document for chunk in chunks]
        return TokenRows(self.encode("".join(chunk.text for chunk in chunks)), ends[is_end])

    def decode(self, ids: Sequence[int] | NDArray) -> str:
        return "".join(self.characters[int(i)] for i in ids)

    def files(self) -> dict[str, bytes]:
        vocabulary = {character: i for i, character in enumerate(self.characters)}
        tokenizer = RustTokenizer(models.WordLevel(vocabulary))
        # A dot would not match a newline. There is no unknown token, so unknown characters raise.
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        tokenizer.decoder = decoders.Fuse()  # joins without spaces
        contents = (tokenizer.to_str(pretty=False), json.dumps(FIXED_SETTINGS), "{}")
        encoded = [content.encode() + b"\n" for content in contents]
        return dict(zip(TOKENIZER_FILES, encoded, strict=True))

    @classmethod
    def load(cls, folder: Path) -> CharTokenizer:
        """Load what `save` wrote. Raises DataError if the vocabulary is not valid."""
        path = folder / TOKENIZER_FILES[0]
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            vocabulary = dict(sorted(content["model"]["vocab"].items()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        characters = "".join(vocabulary)
        numbered = {character: i for i, character in enumerate(characters)}
        if not characters or repr(vocabulary) != repr(numbered):  # True is 1, and no int
            raise DataError(f"{path} does not number single characters from 0, in their order")
        return cls(characters)
