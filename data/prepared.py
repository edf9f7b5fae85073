"""The folder of a prepared text: what is in it, read back and verified."""

from __future__ import annotations

import errno
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from data.progress import Progress
from data.stream import TokenStream
from data.tokenizer import CharTokenizer

FORMAT = 1
"""Part of every cache key and fingerprint: raise it when prepared corpora change."""
TOKENS, INFO = "tokens.arrow", "corpus.json"
PIECE_TOKENS = 1 << 20
MISSING = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
"""Of a file that is not there or not whole; pyarrow's errors have no number."""


@dataclass(frozen=True)
class CorpusInfo:
    """What `corpus.json` keeps."""

    name: str
    characters: int
    documents: int
    split: int
    """The first held-out token."""
    fingerprint: str
    """Of the text and its split, in hexadecimal; equal for equal text, however it was stored."""


@dataclass(frozen=True)
class Prepared:
    """What the folder of a prepared text holds."""

    info: CorpusInfo
    tokenizer: CharTokenizer
    tokens: TokenStream


class Damaged(Exception):
    """The folder is not as it was written; the message says what is wrong."""


def begin_fingerprint(tokenizer: CharTokenizer) -> hashlib._Hash:
    """The digest of a text before its tokens, with which it is then updated, in their order."""
    return hashlib.sha256(tokenizer.characters.encode())


def end_fingerprint(digest: hashlib._Hash, split: int) -> str:
    """The fingerprint of the text whose tokens the digest has seen."""
    digest.update(f"\0{FORMAT}\0{split}".encode())
    return digest.hexdigest()


def load_prepared(folder: Path, verify: bool, progress: Progress) -> Prepared:
    """Read a prepared text. `verify` reads all of it, and compares it with its fingerprint.

    Raises Damaged where the folder is not as it was written, and OSError where it is not readable.
    """
    try:
        prepared = _read(folder)
        if verify and _fingerprint(prepared, progress) != prepared.info.fingerprint:
            raise Damaged("its tokens are not those of its fingerprint")
    except Damaged:
        raise
    except OSError as error:
        if error.errno not in MISSING:
            raise
        raise Damaged(_reason(error)) from error
    except Exception as error:  # of JSON, of pyarrow, of the vocabulary
        raise Damaged(_reason(error)) from error
    return prepared


def _read(folder: Path) -> Prepared:
    try:
        info = CorpusInfo(**json.loads((folder / INFO).read_text(encoding="utf-8")))
    except TypeError as error:  # it is no object, or has other keys
        raise Damaged(f"{INFO} does not say what it should") from error
    tokenizer = CharTokenizer.load(folder)
    tokens = TokenStream.from_arrow(folder / TOKENS)
    for number in (info.characters, info.documents, info.split):
        if type(number) is not int:
            raise Damaged(f"{INFO} holds {number!r:.40} for a number")
    if info.characters != len(tokens) or not 0 <= info.split <= len(tokens):
        raise Damaged(f"{INFO} and {TOKENS} do not belong together")
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
