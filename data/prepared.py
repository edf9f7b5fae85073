"""The folder of a prepared text: loaded and verified."""

from __future__ import annotations

import errno
import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.printable import reason_of
from data.documents import Documents
from data.progress import Progress
from data.round_trip import NEGLIGIBLE, RoundTrip, lost_in_words
from data.subwords import load_tokenizer
from data.token_file import TokenFile, TokenStream
from data.tokenizer import Tokenizer

FORMAT = 2
"""Part of the fingerprints that snapshots store, and of the names in the cache; of streams, too.
Increase it when the same source would have another text, other rows or another order of them."""
ALL_HELD_OUT = 1.0
"""The `val_fraction` of a text that is only evaluated: no token is trained on."""
TOKENS, INFO = "tokens.arrow", "corpus.json"
MISSING = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
LONGEST_CHARACTER = 4
"""Bytes of the longest character in UTF-8."""


@dataclass
class CorpusInfo:
    """The content of `corpus.json`. What nobody has counted is 0."""

    name: str = ""
    characters: int = 0
    documents: int = 0
    tokens: int = 0
    split: int = 0
    """The first held-out token."""
    train_bytes: int = 0
    """Bytes of the training text in UTF-8; for conversations, of the assistant's text."""
    held_out_bytes: int = 0
    held_out_targets: int = 0
    """Number of tokens of these bytes."""
    left_out: int = 0
    """Number of conversations left out because not even their first reply fits."""
    shortened: int = 0
    """Number of conversations that lost turns to fit."""
    fingerprint: str = ""
    """Hex digest of text, split and tokenizer; equal texts have equal ones in any format."""
    documents_fingerprint: str = ""
    """Hex digest of where documents end, and of which tokens are targets."""
    unwritten: dict[str, int] = field(default_factory=dict)
    """Number of conversations with a field that their chat template never mentions, by field."""
    different: int = 0
    """Number of different tokens that occur."""
    unknown: int = 0
    """Number of unknown tokens; for a stream, in its held-out rows."""
    checked: int = 0
    """Number of characters that were decoded again."""
    lost: int = 0
    """Number of these characters that were lost."""
    which: str = ""
    """Some of them."""

    @property
    def trip(self) -> RoundTrip:
        """The part of the text that the tokens lose."""
        return RoundTrip(self.checked, self.lost, self.which)

    @property
    def unknown_share(self) -> float:
        """The share of unknown tokens."""
        return self.unknown / max(1, self.tokens or self.held_out_targets)

    @property
    def lost_in_words(self) -> str | None:
        """The part of the text that the tokens lose, in words; None if they lose nothing."""
        return lost_in_words(self.unknown_share, self.trip)

    @property
    def is_lossy(self) -> bool:
        """Whether more is lost than bits per byte, with the digits that are printed, allow."""
        return max(self.unknown_share, self.lost / max(1, self.checked)) > NEGLIGIBLE

    def bits_per_byte(self, loss: float) -> float | None:
        """A held-out loss in nats per token, as bits per byte of the raw text.

        None if the tokens do not hold the text, or have none.
        """
        if self.is_lossy or not self.held_out_bytes:
            return None
        return loss / math.log(2) * self.held_out_targets / self.held_out_bytes

    @property
    def fingerprint_of_documents(self) -> str:
        """The fingerprint of a text whose documents are kept apart."""
        return hashlib.sha256(
            f"{self.fingerprint}{self.documents_fingerprint}".encode()
        ).hexdigest()


@dataclass(frozen=True)
class Prepared:
    """The content of the folder of a prepared text."""

    info: CorpusInfo
    tokenizer: Tokenizer
    tokens: TokenStream
    folder: Path
    has_targets: bool
    """Whether it is of conversations, which store their targets."""

    def ends(self) -> NDArray[np.int64]:
        """The first token after each document. Raises Damaged if it is not what was written."""
        ends = TokenFile(self.folder / TOKENS).ends()
        if len(ends) != self.info.documents:
            raise Damaged(f"{TOKENS} does not match {INFO}")
        return ends

    def documents(self, begin: int, stop: int) -> Documents:
        """The conversations of tokens begin..stop. Raises Damaged if they are not as written."""
        file, ends = TokenFile(self.folder / TOKENS), self.ends()
        chosen = (ends > begin) & (ends <= stop)
        tokens, own = self.tokens.part(begin, stop), ends[chosen] - begin
        trained = TokenStream.from_arrow(file.path, "trained").part(begin, stop)
        return Documents(tokens, own, trained, file.numbers("targets")[chosen])


class Damaged(Exception):
    """The folder has changed since it was written. The message names the fault."""


def load_prepared(folder: Path, verify: bool, progress: Progress) -> Prepared:
    """Load a prepared text. `verify` reads all of it and compares it with its fingerprint.

    Raises Damaged if the folder has changed since it was written, and OSError if it is unreadable.
    """
    try:
        prepared = _read(folder)
        info = prepared.info
        if verify:
            progress.doing("verifying the prepared text", info.tokens)
            tokens, documents = fingerprints_of(folder, prepared.tokenizer, info.split, progress)
            if info.fingerprint != tokens:
                raise Damaged("its tokens do not match its fingerprint")
            if info.documents_fingerprint != documents:
                raise Damaged("its documents do not match their fingerprint")
    except Damaged:
        raise
    except OSError as error:
        if error.errno not in MISSING:
            raise
        raise Damaged(reason_of(error)) from error
    except Exception as error:  # from JSON, pyarrow or the vocabulary
        raise Damaged(reason_of(error)) from error
    return prepared


def _read(folder: Path) -> Prepared:
    found, expected = json.loads((folder / INFO).read_text(encoding="utf-8")), vars(CorpusInfo())
    if not isinstance(found, dict) or found.keys() != expected.keys():
        raise Damaged(f"{INFO} has other keys than expected")
    for name, default in expected.items():
        if type(found[name]) is not type(default):
            raise Damaged(f"{INFO} holds {found[name]!r:.40} as {name}")
    info = CorpusInfo(**found)
    tokenizer = load_tokenizer(folder)
    tokens = TokenStream.from_arrow(folder / TOKENS)
    size = info.train_bytes, info.held_out_bytes
    has_targets = _has_targets(TokenFile(folder / TOKENS))
    if info.tokens != len(tokens) or not 0 <= info.split <= len(tokens):
        raise Damaged(f"{INFO} does not match {TOKENS}")
    least = 0 if has_targets else info.characters  # of conversations, what is trained on
    if min(size) < 0 or not least <= sum(size) <= LONGEST_CHARACTER * info.characters:
        raise Damaged(f"{INFO} has numbers of characters and bytes that no text has")
    return Prepared(info, tokenizer, tokens, folder, has_targets)


def fingerprints_of(
    folder: Path, tokenizer: Tokenizer, split: int, progress: Progress
) -> tuple[str, str]:
    """Hex digests of the tokens in a folder, and of where documents end and which are targets.

    The first depends on tokenizer and split, too. All of the file is read.
    """
    path, done = folder / TOKENS, 0
    of_tokens = hashlib.sha256(tokenizer.identity)
    for piece in TokenStream.from_arrow(path).pieces():
        of_tokens.update(piece.data)
        progress.done = done = done + len(piece)
    of_tokens.update(f"\0{FORMAT}\0{split}".encode())
    file = TokenFile(path)
    of_documents = hashlib.sha256(file.ends().tobytes())
    if _has_targets(file):
        of_documents.update(file.numbers("targets").tobytes())
        trained = hashlib.sha256()
        for piece in TokenStream.from_arrow(path, "trained").pieces():
            trained.update(piece.data)
        of_documents.update(trained.digest())
    return of_tokens.hexdigest(), of_documents.hexdigest()


def _has_targets(file: TokenFile) -> bool:
    return "trained" in file.schema().names
