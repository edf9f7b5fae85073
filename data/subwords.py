"""Tokenizers of subwords: loaded from a `tokenizer.json` of the `tokenizers` library, or trained.

A snapshot has the tokenizer.json that it was trained with, byte by byte, unless that file cuts or
pads texts, has special tokens beyond the embedding, or other flags than tokenizer_config.json. Of
tokenizer_config.json only special tokens and the chat templates stay: other entries may name code,
or change the ids.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer

from common.printable import reason_of
from data.chunks import Chunk
from data.errors import DataError
from data.token_file import TokenRows
from data.tokenizer import (
    FIXED_SETTINGS,
    TOKENIZER_FILES,
    CharTokenizer,
    Tokenizer,
    lacks_file,
    smallest_unsigned,
    written_again,
)
from data.tokenizer_files import (
    CONFIG,
    chat_templates,
    end_ids,
    own_form,
    read,
    read_json,
    special_tokens,
    tokenizer_settings,
)

END_OF_TEXT = "<|endoftext|>"
MOST_CHARACTERS = 100_000_000
"""The trainer holds every different word: of a longer text it reads a part, spread over all."""

LONGEST_WORD = 100
"""Characters that are merged at most: merging takes a time that grows with the square of them, and
3 MB without a space, such as DNA, would take hours."""
WORDS = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}{1,#}| ?\p{N}{1,#}| ?[^\s\p{L}\p{N}]{1,#}"
    r"|\s{1,#}(?!\S)|\s{1,#}"
).replace("#", str(LONGEST_WORD))
"""GPT-2's words, cut where they are longer."""


class SubwordTokenizer(Tokenizer):
    """A tokenizer from a tokenizer.json, with its special tokens and chat templates."""

    def __init__(
        self,
        content: bytes,
        settings: dict[str, Any],
        where: str,
        ends: Sequence[int] = (),
        rows: int = sys.maxsize,
    ) -> None:
        """`where` names it in messages; for the others see `own_form`. Raises DataError."""
        self._where = where
        try:
            self._content, self._settings = own_form(content, settings, ends, rows)
            self._rust = RustTokenizer.from_buffer(self._content)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the Rust library is not an Exception
            raise DataError(
                f"{where}: its {TOKENIZER_FILES[0]} cannot be read, or does not fit its "
                f"{TOKENIZER_FILES[1]}: {reason_of(error):.200}. {written_again(where)}"
            ) from error
        if "eos_token" not in self._settings:
            raise DataError(
                f"{where} has no end-of-text token, which separates documents: its "
                "tokenizer_config.json needs an eos_token that its tokenizer.json has, or its "
                "config.json an eos_token_id."
            )
        # A text that contains "<|endoftext|>" has these characters, and no document ends there.
        self._rust.encode_special_tokens = True
        self._added = sorted(self._rust.get_added_tokens_decoder().items())
        vocabulary = self._rust.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.dtype = smallest_unsigned(self.vocab_size)
        self.special_tokens, _ = special_tokens(self._settings)
        """The texts of the special tokens by name, as a chat template uses them."""
        self.chat_templates = chat_templates(self._settings)
        """The chat templates by name; a single one is named default."""
        self.added_tokens = {token.content: number for number, token in self._added}
        """The tokens that are read as a whole, by text."""
        self.end_of_text: int = vocabulary[self._settings["eos_token"]]
        self.marks = {token.content: number for number, token in self._added if token.special}
        """Those of them that are special."""

    @property
    def identity(self) -> bytes:
        added = [(number, repr(token)) for number, token in self._added]
        digest = hashlib.sha256(self._content).digest()
        return f"subwords\0{self.end_of_text}\0{added}".encode() + digest

    @property
    def beginning(self) -> str:
        """A newline, or a full stop if the tokenizer drops newlines."""
        return "\n" if len(self.encode("\n")) else "."

    @property
    def before_text(self) -> list[int]:
        encoding = self._rust.encode(self.beginning, add_special_tokens=True)
        return encoding.ids[: sum(1 for _ in takewhile(bool, encoding.special_tokens_mask))]

    def encode(self, text: str) -> NDArray:
        return np.array(self._encodings(self._rust, [text])[0].ids, dtype=self.dtype)

    def encode_chunks(self, chunks: Sequence[Chunk]) -> TokenRows:
        """The texts are shared between all cores."""
        ids = array(self.dtype.char)  # filled from lists faster than numpy converts them
        ends: list[int] = []
        encodings = self._encodings(self._rust, [chunk.text for chunk in chunks])
        for chunk, encoding in zip(chunks, encodings, strict=True):
            ids.fromlist(encoding.ids)
            if chunk.ends_document:
                ids.append(self.end_of_text)
                ends.append(len(ids))
        return TokenRows(np.frombuffer(ids, self.dtype), np.array(ends, dtype=np.int64))

    def encode_divided(self, text: str, cut: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of the parts between cuts, and the characters from which each one is.

        A special token in a part is read as such. Raises DataError if a part has no encoding.
        """
        (newline,) = self._encodings(self._with_marks, ["\n"])
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        begin = 0
        for part in text.split(cut):
            # After a newline, because SentencePiece puts a space before whatever it is given.
            before, skipped = ("\n", len(newline.ids)) if begin else ("", 0)
            (encoding,) = self._encodings(self._with_marks, [before + part])
            if encoding.ids[:skipped] != newline.ids[:skipped]:
                before, skipped = "", 0
                (encoding,) = self._encodings(self._with_marks, [part])
            shift = begin - len(before)
            ids += encoding.ids[skipped:]
            places += [(shift + first, shift + end) for first, end in encoding.offsets[skipped:]]
            begin += len(part) + len(cut)
        return ids, places

    @cached_property
    def _with_marks(self) -> RustTokenizer:
        """The same tokenizer, to which a special token in a text is that token."""
        return RustTokenizer.from_str(self._rust.to_str())

    def _encodings(self, rust: RustTokenizer, texts: list[str]) -> list[Any]:
        try:
            if len(texts) == 1:  # without a thread on each core
                return [rust.encode(texts[0], add_special_tokens=False)]
            return list(rust.encode_batch_fast(texts, add_special_tokens=False))
        except Exception as error:  # of many types: a lone surrogate, no unknown token, ...
            raise DataError(f"{self._where} cannot encode the text: {error}") from error

    def decode(self, ids: Sequence[int] | NDArray) -> str:
        numbers = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        return self._rust.decode(numbers, skip_special_tokens=False)

    def files(self) -> dict[str, bytes]:
        settings = json.dumps({**FIXED_SETTINGS, **self._settings}).encode() + b"\n"
        contents = self._content, settings, b"{}\n"
        return dict(zip(TOKENIZER_FILES, contents, strict=True))


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer in the folder of a model: of this project, or of any other.

    Raises DataError if there is none.
    """
    path, settings_path, _ = (folder / name for name in TOKENIZER_FILES)
    if not path.exists():
        raise DataError(lacks_file(str(folder), str(folder)))
    if read_json(settings_path).keys() == FIXED_SETTINGS.keys():  # no other one has these alone
        return CharTokenizer.load(folder)
    rows = read_json(folder / CONFIG).get("vocab_size")
    return SubwordTokenizer(
        read(path),
        tokenizer_settings(folder),
        f"data.tokenizer={folder}",
        end_ids(folder),
        rows if type(rows) is int else sys.maxsize,
    )


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load what any tokenizer's `save` wrote. Raises DataError if it is not that."""
    tokenizer = tokenizer_of(folder)
    for name, content in tokenizer.files().items() if tokenizer.unit == "token" else ():
        if read(folder / name) != content:
            raise DataError(
                f"{folder / name} has entries that no tokenizer here has, or lacks some"
            )
    return tokenizer


def train_bpe(size: int, chunks: Iterable[Chunk], characters: int) -> SubwordTokenizer:
    """Train byte-level BPE of at most `size` tokens on the chunks that are not held out.

    See Sennrich et al. (2016) and Radford et al. (2019). The result depends on the text alone: the
    trainer counts words and pairs, and breaks ties by the numbers of the tokens, so neither the
    number of threads nor the order of the counts matters. The chunks have about `characters`
    characters. A text in which fewer pairs occur twice gives fewer tokens. Raises DataError as
    reading the chunks does.
    """
    tokenizer = RustTokenizer(models.BPE())
    # Every byte has a token, so every text has an encoding.
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, of_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_sample(chunks, characters), trainer=trainer)
    content = tokenizer.to_str(pretty=False).encode() + b"\n"
    return SubwordTokenizer(content, {"eos_token": END_OF_TEXT}, f"data.tokenizer=bpe:{size}")


def _sample(chunks: Iterable[Chunk], characters: int) -> Iterator[str]:
    """The text of every n-th chunk, `MOST_CHARACTERS` of them at most."""
    every = -(-characters // MOST_CHARACTERS)
    for number, chunk in enumerate(chunks):
        if chunk.held_out:
            return
        if number % every == 0:
            yield chunk.text
