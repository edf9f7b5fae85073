"""Tokenizers of subwords: loaded from a `tokenizer.json` of the `tokenizers` library, or trained.

A snapshot has the tokenizer.json that it was trained with, byte by byte, unless that file cuts or
pads texts, has special tokens beyond the embedding, or other flags than tokenizer_config.json. Of
tokenizer_config.json only special tokens and the chat template stay: other entries may name code,
or change the ids.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer

from common.printable import reason_of
from data.chunks import Chunk, Row
from data.errors import DataError
from data.token_file import TokenRows
from data.tokenizer import (
    FIXED_SETTINGS,
    TOKENIZER_FILES,
    CharTokenizer,
    Tokenizer,
    lacks_file,
    smallest_unsigned,
)
from data.tokenizer_files import (
    CONFIG,
    LISTED,
    MORE,
    NAME_END,
    add_listed_tokens,
    end_ids,
    kept_settings,
    make_special,
    model_settings,
    more_tokens,
    named_tokens,
    read,
    read_json,
    tokenizer_settings,
    without_rows,
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
    """A tokenizer from the bytes of a tokenizer.json, with its special tokens and chat template."""

    def __init__(
        self,
        content: bytes,
        settings: dict[str, Any],
        where: str,
        ends: Sequence[int] = (),
    ) -> None:
        """`settings` are the entries of a tokenizer_config.json, see `kept_settings`.

        `where` names it in messages; one of `ends` ends a text if `settings` have no eos_token.
        Raises DataError.
        """
        self._where = where
        self._rust = rust = _parsed(content, where)
        settings, before = dict(settings), _added(rust)
        add_listed_tokens(rust, settings.pop(LISTED, None) or {}, where)
        if rust.truncation or rust.padding or _added(rust) != before:
            # Texts of any length are encoded, and a token for padding may be beyond the embedding.
            rust.no_truncation()
            rust.no_padding()
            content = rust.to_str(pretty=False).encode() + b"\n"
        self._content = content
        if rust.token_to_id(settings.get("eos_token", "")) is None:
            texts = [text for text in map(rust.id_to_token, ends) if text is not None]
            settings |= {"eos_token": texts[0]} if texts else {}
        make_special(rust, [*named_tokens(settings).values(), *more_tokens(settings)])
        # A text that contains "<|endoftext|>" has these characters, and no document ends there.
        rust.encode_special_tokens = True
        numbers = rust.get_vocab(with_added_tokens=True).values()
        self._vocab_size = max(numbers, default=-1) + 1
        # Without a token of its own transformers would add it, beyond the embedding.
        self._settings = {
            name: value
            for name, value in settings.items()
            if not name.endswith(NAME_END) or rust.token_to_id(value) is not None
        }
        if MORE in settings:
            known = [text for text in settings[MORE] if rust.token_to_id(text) is not None]
            self._settings[MORE] = known
        if "eos_token" not in self._settings:
            raise DataError(
                f"{where} has no end-of-text token, which separates documents: its "
                "tokenizer_config.json needs an eos_token that its tokenizer.json has, or its "
                "config.json an eos_token_id."
            )
        self.end_of_text: int | None = rust.token_to_id(self._settings["eos_token"])
        self.dtype = smallest_unsigned(self._vocab_size)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @cached_property
    def unknown(self) -> int | None:
        model = json.loads(self._content)["model"]
        unknown, name = model.get("unk_id"), model.get("unk_token")
        unknown = unknown if name is None else self._rust.token_to_id(name)
        # GPT-2 names its end-of-text token, which its bytes never need.
        return unknown if type(unknown) is int and unknown != self.end_of_text else None

    @property
    def special_tokens(self) -> dict[str, str]:
        """The texts of the special tokens by name, as a chat template uses them."""
        return named_tokens(self._settings)

    @property
    def marks(self) -> dict[str, int]:
        """The special tokens by text, those of tokenizer.json as well."""
        added = self._rust.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    @property
    def added_tokens(self) -> dict[str, int]:
        """The tokens that are read as a whole, by text: those of `marks` and others."""
        added = self._rust.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items()}

    @property
    def chat_templates(self) -> dict[str, str]:
        """The chat templates by name; a single one is named default."""
        template = self._settings.get("chat_template", [])
        if not isinstance(template, list):
            return {"default": template}
        return {one["name"]: one["template"] for one in template}

    @property
    def identity(self) -> bytes:
        digest = hashlib.sha256(self._content).digest()
        return f"subwords\0{self.end_of_text}\0{_added(self._rust)}".encode() + digest

    @property
    def beginning(self) -> str:
        """A newline, or a full stop if the tokenizer drops newlines."""
        return "\n" if len(self.encode("\n")) else "."

    @property
    def before_text(self) -> list[int]:
        encoding = self._rust.encode(self.beginning, add_special_tokens=True)
        return encoding.ids[: sum(1 for _ in takewhile(bool, encoding.special_tokens_mask))]

    def encode(self, text: str) -> NDArray:
        return np.array(self._encodings([text])[0].ids, dtype=self.dtype)

    def encode_rows(self, rows: Sequence[Row]) -> list[TokenRows]:
        """The texts are shared between all cores."""
        assert self.end_of_text is not None
        encodings = iter(self._encodings([chunk.text for row in rows for chunk in row]))
        encoded = []
        for row in rows:
            ids = array(self.dtype.char)  # filled from lists faster than numpy converts them
            ends: list[int] = []
            for chunk, encoding in zip(row, encodings, strict=False):
                ids.fromlist(encoding.ids)
                if chunk.ends_document:
                    ids.append(self.end_of_text)
                    ends.append(len(ids))
            tokens = np.frombuffer(ids, dtype=self.dtype)
            encoded.append(TokenRows(tokens, np.array(ends, dtype=np.int64)))
        return encoded

    def _encodings(self, texts: list[str]) -> list[Any]:
        with self._refusing():
            if len(texts) == 1:  # without a thread on each core
                return [self._rust.encode(texts[0], add_special_tokens=False)]
            return list(self._rust.encode_batch_fast(texts, add_special_tokens=False))

    def encode_parts(
        self, parts: Iterable[tuple[str, bool, int]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of consecutive parts of a text, and the characters from which each one is.

        A part is a text, whether it is a special token that a message spells out, and the index of
        its first character. As transformers encodes a sanitized chat: a part is encoded after a
        newline, because SentencePiece puts a space before whatever it is given. Raises DataError
        if one has no encoding, or stays a special token as text.
        """
        newline, _ = self._with_marks("\n")
        all_ids: list[int] = []
        all_offsets: list[tuple[int, int]] = []
        for text, as_text, begin in parts:
            encode = self._as_text if as_text else self._with_marks
            with self._refusing():
                ids, offsets = encode(text)
                after, places = encode("\n" + text) if begin else ([], [])
            if begin and after[: len(newline)] == newline:
                ids = after[len(newline) :]
                offsets = [(first - 1, end - 1) for first, end in places[len(newline) :]]
            if as_text and self._reading_marks.token_to_id(text) in ids:
                raise DataError(f"{self._where} cannot encode {text} as text: it stays one token")
            all_ids += ids
            all_offsets += [(begin + first, begin + end) for first, end in offsets]
        return all_ids, all_offsets

    def _with_marks(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of a text in which special tokens are read as such, and their places."""
        encoding = self._reading_marks.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def _as_text(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of a text in which added tokens are text, too; each is at all of it."""
        rust, splits = self._reading_marks, [text]
        if rust.normalizer is not None:
            splits = [rust.normalizer.normalize_str(text)]
        if rust.pre_tokenizer is not None:
            splits = [split for split, _ in rust.pre_tokenizer.pre_tokenize_str(splits[0])]
        ids = [token.id for split in splits for token in rust.model.tokenize(split)]
        return ids, [(0, len(text))] * len(ids)

    @cached_property
    def _reading_marks(self) -> RustTokenizer:
        return RustTokenizer.from_str(self._rust.to_str())

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of many types: a lone surrogate, no unknown token, ...
            raise DataError(f"{self._where} cannot encode the text: {error}") from error

    def decode(self, ids: Sequence[int] | NDArray) -> str:
        numbers = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        return self._rust.decode(numbers, skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        settings = json.dumps({**FIXED_SETTINGS, **self._settings}).encode() + b"\n"
        for name, content in zip(TOKENIZER_FILES, (self._content, settings, b"{}\n"), strict=True):
            (folder / name).write_bytes(content)

    @classmethod
    def load(cls, folder: Path) -> SubwordTokenizer:
        """Load what `save` wrote. Raises DataError if it is not that."""
        path = folder / TOKENIZER_FILES[1]
        settings = read_json(path)
        if any(settings.pop(name, None) != value for name, value in FIXED_SETTINGS.items()):
            raise DataError(f"{path} has entries that no tokenizer here has")
        kept, content = kept_settings(settings), read(folder / TOKENIZER_FILES[0])
        loaded = cls(content, kept, str(folder))
        if kept != settings or loaded._settings != kept or loaded._content != content:
            raise DataError(f"{path} lacks entries of its tokenizer, or has others")
        return loaded

    @classmethod
    def from_folder(cls, folder: Path) -> SubwordTokenizer:
        """The tokenizer in the folder of a transformers model; DataError if it has none."""
        if folder.is_dir() and not (folder / TOKENIZER_FILES[0]).exists():
            then = f"copy the {TOKENIZER_FILES[0]} there"
            raise DataError(lacks_file(str(folder), str(folder), then))
        content, settings = read(folder / TOKENIZER_FILES[0]), tokenizer_settings(folder)
        listed, rows = settings.get(LISTED), model_settings(folder, CONFIG).get("vocab_size")
        if type(rows) is int:
            content = without_rows(content, rows)
            if isinstance(listed, dict):
                listed = {i: one for i, one in listed.items() if not i.isdigit() or int(i) < rows}
        kept = kept_settings(settings) | {LISTED: listed}
        return cls(content, kept, f"data.tokenizer={folder}", end_ids(folder))


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load what any tokenizer's `save` wrote. Raises DataError if it is not valid."""
    loads = CharTokenizer.load if _has_characters(folder) else SubwordTokenizer.load
    return loads(folder)


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer in the folder of a model: of this project, or of any other.

    Raises DataError if there is none.
    """
    loads = CharTokenizer.load if _has_characters(folder) else SubwordTokenizer.from_folder
    return loads(folder)


def _has_characters(folder: Path) -> bool:
    """Whether a folder has a tokenizer of characters: no other one has these entries alone."""
    return set(model_settings(folder, TOKENIZER_FILES[1])) == set(FIXED_SETTINGS)


def _added(rust: RustTokenizer) -> list[tuple[int, str]]:
    """The added tokens with all their flags, in order."""
    return sorted((number, repr(one)) for number, one in rust.get_added_tokens_decoder().items())


def _parsed(content: bytes, where: str) -> RustTokenizer:
    try:
        return RustTokenizer.from_buffer(content)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the Rust library is not an Exception
        reason = reason_of(error)
        raise DataError(f"{where}: its tokenizer.json cannot be read: {reason:.200}") from error


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
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
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
