"""Preparation of a text in passes and bounded memory: the folder that `data.corpus` loads.

Vocabulary, split and fingerprint depend on the text alone; tokens are written to an Arrow file.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.chat import TRAINING_DATE, ChatTemplate, no_template
from data.encode import MOST_THREADS, Encoded, encoded, encoded_chats, in_order
from data.errors import BrokenText, DataError, UnknownCharacter
from data.messages import texts_in
from data.pieces import Chunk, Piece, chunks_of
from data.prepared import (
    ALL_HELD_OUT,
    FORMAT,
    INFO,
    TOKENS,
    CorpusInfo,
    fingerprints_of,
)
from data.progress import Progress
from data.round_trip import RoundTrip, round_trip
from data.sources import Source
from data.subwords import tokenizer_of, train_bpe
from data.token_file import TokenRows, joined, write_tokens
from data.tokenizer import (
    CHARACTERS,
    CODE_POINTS,
    CharTokenizer,
    Tokenizer,
    bpe_size,
    code_points,
)
from data.tokenizer_files import folder_key

MANY_DOCUMENTS = 100
"""With this many documents or more, the split is at the end of a document."""
BATCH_TOKENS = 1 << 22
"""Of a record batch, at least: a file of few batches opens faster."""


@dataclass(frozen=True)
class Preparation:
    """What decides the content of a prepared text."""

    source: Source
    tokenizer: str | Path
    """char, bpe:<size>, or the folder of one."""
    val_fraction: float
    longest: int | None
    """With it the documents are conversations, of at most so many tokens."""

    @property
    def key(self) -> str:
        """The name of its folder in the cache."""
        chosen = self.tokenizer
        chosen = folder_key(chosen) if isinstance(chosen, Path) else chosen
        parts = FORMAT, self.source.key, repr(self.val_fraction), chosen, self.longest
        return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]

    @property
    def trained_size(self) -> int | None:
        """The size of the vocabulary that is trained on the text; None for any other tokenizer."""
        return bpe_size(self.tokenizer) if isinstance(self.tokenizer, str) else None

    def passes(self) -> Iterator[str]:
        """The names of the passes over the text."""
        ordinals = ["first", "second", "third"] if self.trained_size else ["first", "second"]
        total = {2: "two", 3: "three"}[len(ordinals)]
        return (f"preparing {self.source.name}, {one} of {total} passes" for one in ordinals)


@dataclass
class Scan:
    """The results of the first pass."""

    characters: int
    ends: NDArray[np.int64]
    """The end of each document, in characters."""
    alphabet: str
    """Every character of the text once, in code-point order; only for a tokenizer of characters."""


def build(wanted: Preparation, building: Path, threads: int, progress: Progress) -> None:
    """Write the files of a prepared text to the folder `building`, and flush them to the disk.

    `threads` work in addition to the one that reads and writes. Raises DataError if the text cannot
    be read, or changes meanwhile.
    """
    source, passes = wanted.source, wanted.passes()
    template = None if wanted.longest is None else _template(wanted.tokenizer)
    try:
        progress.doing(next(passes), unit="million characters")
        by_characters = wanted.tokenizer == CHARACTERS
        scan = _scan_text(source, by_characters, min(threads, MOST_THREADS), progress)
        cut = _split(wanted, scan)
        if wanted.trained_size:
            progress.doing(next(passes), cut)
        tokenizer = _tokenizer(wanted, scan, cut, progress)
        trip = RoundTrip()
        if not by_characters:
            trip = round_trip(_texts_of(source.read(), template is not None), tokenizer)
        progress.doing(next(passes), scan.characters)
        parts: Iterator[Encoded]
        if template is None or wanted.longest is None:
            parts = encoded(source.read(), tokenizer, cut, threads)
        else:
            parts = encoded_chats(source.read(), template, cut, wanted.longest, source)
        totals = _write_tokens(parts, building, tokenizer, template is not None, progress)
    except DataError as error:
        own = wanted.tokenizer == CHARACTERS and isinstance(error, UnknownCharacter)
        if source.is_unchanged and not own:
            raise
        raise _changed(source) from error
    if totals.info.characters != scan.characters or not source.is_unchanged:
        raise _changed(source)
    progress.doing(f"verifying the prepared {source.name}", totals.info.tokens)
    of_tokens, of_documents = fingerprints_of(building, tokenizer, totals.info.split, progress)
    info = replace(
        totals.finish(source.name),
        fingerprint=of_tokens,
        documents_fingerprint=of_documents,
        **vars(trip),
    )
    tokenizer.save(building)
    (building / INFO).write_text(json.dumps(asdict(info), indent=2) + "\n")
    _describe(building, info)
    for file in building.iterdir():
        with open(file, "rb") as written_file:
            os.fsync(written_file.fileno())


def _texts_of(pieces: Iterable[Piece], are_conversations: bool) -> Iterator[str]:
    for piece in pieces:
        if not are_conversations:
            yield piece["text"]
            continue
        for line in filter(None, piece["text"].split("\n")):
            yield from texts_in(json.loads(line))


def _changed(source: Source) -> DataError:
    return DataError(
        f"data.source={source.name} changed while it was read. Start again when no process "
        "writes to it any more, or use a copy of it."
    )


def _scan_text(source: Source, by_characters: bool, threads: int, progress: Progress) -> Scan:
    """First pass: where documents end, how many characters there are, and which."""
    seen = np.zeros(CODE_POINTS, dtype=bool)

    def scan(piece: Piece) -> tuple[int, list[int]]:
        if by_characters:
            points = code_points(piece["text"])
            if not seen[points].all():  # reading is faster than writing
                seen[points] = True  # safe: all threads write the same value
        return len(piece["text"]), piece["ends"]

    ends = array("q")
    characters = 0
    for length, piece_ends in in_order(scan, source.read(), threads):
        ends.extend(characters + end for end in piece_ends)
        characters += length
        progress.done = characters
    if characters == 0:
        raise BrokenText(f"data.source={source.name} is empty: there is no text to train on.")
    alphabet = "".join(map(chr, np.flatnonzero(seen)))
    return Scan(characters, np.array(ends, dtype=np.int64), alphabet)


def _split(wanted: Preparation, scan: Scan) -> int:
    """The first held-out character; with many documents, the end of one nearest to the fraction.

    It always is an end between conversations, which cannot be cut. Raises DataError for one
    conversation alone.
    """
    cut = int(scan.characters * (1 - wanted.val_fraction))
    inner = scan.ends[(scan.ends > 0) & (scan.ends < scan.characters)]
    only_ends = wanted.longest is not None
    if wanted.val_fraction == ALL_HELD_OUT:
        return 0
    if only_ends and len(inner) == 0:
        raise DataError(
            f"data.source={wanted.source.name} has one conversation. Use two or more: some are "
            "held out."
        )
    if not only_ends and (len(scan.ends) < MANY_DOCUMENTS or len(inner) == 0):
        return cut
    return int(inner[np.argmin(np.abs(inner - cut))])


def _tokenizer(wanted: Preparation, scan: Scan, cut: int, progress: Progress) -> Tokenizer:
    """The tokenizer; one that is trained reads the training text, and no other."""
    if isinstance(wanted.tokenizer, Path):
        return tokenizer_of(wanted.tokenizer)
    if wanted.trained_size is None:
        return CharTokenizer(scan.alphabet)

    def chunks() -> Iterator[Chunk]:
        for chunk in chunks_of(wanted.source.read(), cut):
            yield chunk
            progress.done += len(chunk.text)

    return train_bpe(wanted.trained_size, chunks(), cut)


def _write_tokens(
    parts: Iterable[Encoded],
    building: Path,
    tokenizer: Tokenizer,
    has_targets: bool,
    progress: Progress,
) -> Totals:
    """Last pass: write the tokens to their file, and count them."""
    totals = Totals(tokenizer)

    def batches() -> Iterator[TokenRows]:
        batch: list[Encoded] = []
        tokens = 0
        for part in parts:
            totals.add(part)
            progress.done = totals.info.characters
            if batch and (tokens >= BATCH_TOKENS or part.held_out != batch[0].held_out):
                yield joined(batch)
                batch, tokens = [], 0
            batch.append(part)
            tokens += len(part.tokens)
        if batch:
            yield joined(batch)

    write_tokens(str(building / TOKENS), batches(), tokenizer.dtype, has_targets)
    return totals


class Totals:
    """Counts the tokens of a text while they are written."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.info = CorpusInfo()
        """What has been counted so far."""
        self._unknown = tokenizer.unknown
        self._seen = np.zeros(tokenizer.vocab_size, dtype=bool)
        self._unwritten: Counter[str] = Counter()

    def add(self, part: Encoded) -> None:
        """Count consecutive tokens."""
        info, count = self.info, len(part.tokens)
        predicted = count if part.targets is None else int(part.targets.sum())
        if part.held_out:
            info.held_out_bytes += part.text_bytes
            info.held_out_targets += predicted
        else:
            info.train_bytes += part.text_bytes
            info.split += count
        if self._unknown is not None:
            info.unknown += int(np.count_nonzero(part.tokens == self._unknown))
        info.documents += len(part.ends)
        info.tokens += count
        info.characters += part.characters
        info.left_out += part.left_out
        info.shortened += part.shortened
        self._unwritten += part.unwritten
        if not self._seen.all():  # after a few parts a text has had every character
            self._seen[part.tokens] = True

    def finish(self, name: str) -> CorpusInfo:
        """What has been counted, as the text of this name."""
        return replace(
            self.info,
            name=name,
            unwritten=dict(self._unwritten),
            different=int(self._seen.sum()),
        )


def _describe(building: Path, info: CorpusInfo) -> None:
    """Add what `datasets.load_from_disk` reads besides the Arrow file, whose columns it knows."""
    state: dict[str, Any] = {
        "_data_files": [{"filename": TOKENS}],
        "_fingerprint": info.fingerprint[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (building / "dataset_info.json").write_text("{}\n")
    (building / "state.json").write_text(json.dumps(state, indent=2) + "\n")


def _template(chosen: str | Path) -> ChatTemplate:
    """The chat template of a tokenizer. Raises DataError if it has none."""
    where = f"data.tokenizer={chosen}"
    if isinstance(chosen, Path):
        return ChatTemplate(tokenizer_of(chosen), where, TRAINING_DATE)
    raise no_template(where)
