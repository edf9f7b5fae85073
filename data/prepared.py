"""The folder of a prepared text: loaded and verified."""

from __future__ import annotations

import errno
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

from data.progress import Progress
from data.stream import TokenStream
from data.subwords import load_tokenizer
from data.tokenizer import Tokenizer

FORMAT = 1
"""Part of every fingerprint, which snapshots store."""
CACHE_FORMAT = 2
"""Part of every cache key; increase it when the format changes."""
ALL_HELD_OUT = 1.0
"""The `val_fraction` of a text that is only evaluated: no token is trained on."""
TOKENS, INFO = "tokens.arrow", "corpus.json"
PIECE_TOKENS = 1 << 20
MISSING = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
"""Errors of a file that is missing or damaged; pyarrow's errors have no number."""
LONGEST_CHARACTER = 4
"""In bytes of UTF-8."""


@dataclass(frozen=True)
class CorpusInfo:
    """The content of `corpus.json`."""

    name: str
    characters: int
    documents: int
    tokens: int
    split: int
    """The first held-out token."""
    train_bytes: int
    """Of the raw text that is trained on, in UTF-8."""
    held_out_bytes: int
    fingerprint: str
    """Hex digest of text, split and tokenizer; equal texts have equal ones in any format."""

    def bits_per_byte(self, loss: float) -> float:
        """A held-out loss in nats per token, as bits per byte of the raw text."""
        return loss / math.log(2) * (self.tokens - self.split) / self.held_out_bytes


@dataclass(frozen=True)
class Prepared:
    """The content of the folder of a prepared text."""

    info: CorpusInfo
    tokenizer: Tokenizer
    tokens: TokenStream


class Damaged(Exception):
    """The folder has changed since it was written. The message names the fault."""


def begin_fingerprint(tokenizer: Tokenizer) -> hashlib._Hash:
    """A new digest of a text; the caller updates it with the tokens, in their order."""
    return hashlib.sha256(tokenizer.identity)


def end_fingerprint(digest: hashlib._Hash, split: int) -> str:
    """The fingerprint of a text, from the digest of its tokens."""
    digest.update(f"\0{FORMAT}\0{split}".encode())
    return digest.hexdigest()


def load_prepared(folder: Path, verify: bool, progress: Progress) -> Prepared:
    """Load a prepared text. `verify` reads all of it and compares it with its fingerprint.

    Raises Damaged if the folder has changed since it was written, and OSError if it is unreadable.
    """
    try:
        prepared = _read(folder)
        if verify and _fingerprint(prepared, progress) != prepared.info.fingerprint:
            raise Damaged("its tokens do not match its fingerprint")
    except Damaged:
        raise
    except OSError as error:
        if error.errno not in MISSING:
            raise
        raise Damaged(_reason(error)) from error
    except Exception as error:  # from JSON, pyarrow or the vocabulary
        raise Damaged(_reason(error)) from error
    return prepared


def _read(folder: Path) -> Prepared:
    try:
        info = CorpusInfo(**json.loads((folder / INFO).read_text(encoding="utf-8")))
    except TypeError as error:  # it is not an object, or has other keys
        raise Damaged(f"{INFO} has other keys than expected") from error
    tokenizer = load_tokenizer(folder)
    tokens = TokenStream.from_arrow(folder / TOKENS)
    size = info.train_bytes, info.held_out_bytes
    for number in (info.characters, info.documents, info.tokens, info.split, *size):
        if type(number) is not int:
            raise Damaged(f"{INFO} holds {number!r:.40} instead of a number")
    if info.tokens != len(tokens) or not 0 <= info.split <= len(tokens):
        raise Damaged(f"{INFO} does not match {TOKENS}")
    if min(size) < 0 or not info.characters <= sum(size) <= LONGEST_CHARACTER * info.characters:
        raise Damaged(f"{INFO} has numbers of characters and bytes that no text has")
    return Prepared(info, tokenizer, tokens)


def _fingerprint(prepared: Prepared, progress: Progress) -> str:
    tokens, digest = prepared.tokens, begin_fingerprint(prepared.tokenizer)
    progress.doing("verifying the prepared text", len(tokens))
    for start in range(0, len(tokens), PIECE_TOKENS):
        digest.update(tokens.window(start, min(PIECE_TOKENS, len(tokens) - start)).data)
        progress.done = start
    return end_fingerprint(digest, prepared.info.split)


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
