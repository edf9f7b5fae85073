"""Writes the Arrow files of a prepared text, and counts and digests what goes into them."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from datasets import Features, List, Value
from datasets.arrow_writer import ArrowWriter
from numpy.typing import NDArray

from data.encode import Encoded
from data.prepared import (
    DOCUMENTS,
    TOKENS,
    CorpusInfo,
    begin_fingerprint,
    documents_digest,
    end_fingerprint,
)
from data.round_trip import RoundTrip
from data.tokenizer import Tokenizer

ENDS_IN_LIST = 1 << 16


class TokenWriter:
    """A context manager around the files; `info` is what they hold, once it has ended."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, has_targets: bool) -> None:
        """With `has_targets` each token is written with whether it is a target."""
        self.characters = 0
        self._tokens = self._split = self._left_out = self._shortened = 0
        self._bytes = {False: 0, True: 0}  # by whether they are held out
        self._held_out_targets = self._first_bytes = 0
        self._unwritten: Counter[str] = Counter()
        self._unknown = tokenizer.unknown
        self._seen = np.zeros(tokenizer.vocab_size, dtype=bool)
        self._unknown_tokens = 0
        self._trip = RoundTrip()
        self._ends: list[NDArray[np.int64]] = []
        self._targets: list[NDArray[np.int64]] = []
        self._digest = begin_fingerprint(tokenizer)
        self._trained = hashlib.sha256() if has_targets else None
        self._folder = folder
        columns = {"tokens": List(Value(tokenizer.dtype.name))}
        if has_targets:
            columns["trained"] = List(Value("uint8"))
        self._writer = _writer(folder / TOKENS, columns)

    def __enter__(self) -> Self:
        self._writer.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._writer.finalize()
            self._write_documents()
        self._writer.__exit__(kind, error, trace)

    def add(self, part: Encoded) -> None:
        """Append consecutive tokens."""
        row: dict[str, NDArray] = {"tokens": part.tokens}
        self._digest.update(part.tokens.data)
        count = len(part.tokens)
        self._seen[part.tokens] = True
        if self._unknown is not None:
            self._unknown_tokens += int(np.count_nonzero(part.tokens == self._unknown))
        self._trip += part.trip
        if part.chats is not None:
            assert self._trained is not None
            row["trained"] = part.chats.trained
            self._trained.update(part.chats.trained.data)
            self._targets.append(part.chats.targets)
            self._left_out += part.chats.left_out
            self._shortened += part.chats.shortened
            self._unwritten += part.chats.unwritten
            count = int(part.chats.targets.sum())
        self._writer.write(row)
        self._ends.append(part.ends + self._tokens)
        self.characters += part.characters
        self._tokens += len(part.tokens)
        self._bytes[part.held_out] += part.text_bytes
        self._first_bytes += part.first_bytes
        if part.held_out:
            self._held_out_targets += count
        else:
            self._split += len(part.tokens)

    def info(self, name: str) -> CorpusInfo:
        """What has been written, as the text of this name."""
        return CorpusInfo(
            name=name,
            characters=self.characters,
            documents=len(self._all(self._ends)),
            tokens=self._tokens,
            split=self._split,
            train_bytes=self._bytes[False],
            held_out_bytes=self._bytes[True],
            first_bytes=self._first_bytes,
            held_out_targets=self._held_out_targets,
            left_out=self._left_out,
            shortened=self._shortened,
            unwritten=dict(self._unwritten),
            different=int(self._seen.sum()),
            unknown=self._unknown_tokens,
            checked=self._trip.checked,
            lost=self._trip.lost,
            which=self._trip.which,
            fingerprint=end_fingerprint(self._digest, self._split),
            documents_fingerprint=documents_digest(
                self._all(self._ends), self._all(self._targets), self._trained
            ),
        )

    def _write_documents(self) -> None:
        columns = {"ends": List(Value("int64")), "targets": List(Value("int64"))}
        ends, targets = self._all(self._ends), self._all(self._targets)
        with _writer(self._folder / DOCUMENTS, columns) as writer:
            for first in range(0, max(1, len(ends)), ENDS_IN_LIST):
                part = slice(first, first + ENDS_IN_LIST)
                writer.write({"ends": ends[part], "targets": targets[part]})
            writer.finalize()

    @staticmethod
    def _all(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
        return np.concatenate([*parts, np.zeros(0, dtype=np.int64)])


def _writer(path: Path, columns: dict[str, List]) -> ArrowWriter:
    return ArrowWriter(path=str(path), features=Features(columns), writer_batch_size=8)
