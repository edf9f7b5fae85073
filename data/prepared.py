"""The folder of a prepared text: what there is to know of it, and whether it is whole."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.printable import reason_of

FORMAT = 2
"""Part of the fingerprints that snapshots store, and of the names in the cache; of streams, too.
Increase it when the same source would have another text, other rows or another order of them."""
ALL_HELD_OUT = 1.0
"""The `val_fraction` of a text that is only evaluated: no token is trained on."""
NEGLIGIBLE = 1e-4
"""The share of lost text that changes no printed digit of bits per byte."""
TOKENS, INFO = "tokens.bin", "corpus.json"


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
    different: int = 0
    """Number of different tokens that occur."""
    unknown: int = 0
    """Number of unknown tokens; for a stream, in its held-out rows."""
    lost: float = 0.0
    """The share of characters, of those that were compared, that the tokens do not hold."""
    which: str = ""
    """Some of these characters."""

    @property
    def unknown_share(self) -> float:
        """The share of unknown tokens."""
        return self.unknown / max(1, self.tokens or self.held_out_targets)

    @property
    def lost_in_words(self) -> str | None:
        """The part of the text that the tokens lose, as a clause; None if they lose nothing."""
        which = ", ".join(map(repr, self.which))
        shares = {
            "of the tokens are unknown to the tokenizer": self.unknown_share,
            f"of the characters are lost when decoded ({which})": self.lost,
        }
        parts = [f"{100 * share:.3g} % {what}" for what, share in shares.items() if share]
        return " and ".join(parts) or None

    @property
    def is_lossy(self) -> bool:
        """Whether more is lost than bits per byte, with the digits that are printed, allow."""
        return max(self.unknown_share, self.lost) > NEGLIGIBLE

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


class Damaged(Exception):
    """The folder has changed since it was written. The message names the fault."""


def save_info(folder: Path, info: CorpusInfo) -> None:
    """Write `corpus.json`, which has the size and hash of every other file, and flush the files."""
    files = {path.name: [path.stat().st_size, _digest_of(path)] for path in folder.iterdir()}
    content: dict[str, Any] = {"info": asdict(info), "files": files}
    content["digest"] = _digest_of_json(content)
    (folder / INFO).write_text(json.dumps(content, indent=2) + "\n")
    for path in folder.iterdir():
        with open(path, "rb") as written_file:
            os.fsync(written_file.fileno())


def read_info(folder: Path, verify: bool) -> CorpusInfo:
    """Read what `save_info` wrote. `verify` reads all files and compares them with their hashes.

    Raises Damaged if the folder has changed since it was written, and OSError if it is unreadable.
    """
    try:
        content = json.loads((folder / INFO).read_text(encoding="utf-8"))
        if content.pop("digest") != _digest_of_json(content):
            raise Damaged(f"{INFO} does not match its hash")
        for name, (size, digest) in content["files"].items():
            path = folder / name
            if path.stat().st_size != size or (verify and _digest_of(path) != digest):
                raise Damaged(f"{name} does not match its hash")
        return CorpusInfo(**content["info"])
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise Damaged(reason_of(error)) from error
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise Damaged(f"{INFO}: {reason_of(error)}") from error


def _digest_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of_json(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
