"""Preparation of a text in passes and bounded memory: the folder that `data.corpus` loads.

Vocabulary, split and fingerprint depend on the text alone; tokens are written to an Arrow file.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from datasets import Features, List, Value
from datasets.arrow_writer import ArrowWriter
from numpy.typing import NDArray

from data.chunks import Chunk, chunks_of
from data.encode import MOST_THREADS, encoded, in_order
from data.errors import BrokenText, DataError, UnknownCharacter
from data.pieces import Piece
from data.prepared import ALL_HELD_OUT, INFO, TOKENS, CorpusInfo, begin_fingerprint, end_fingerprint
from data.progress import Progress
from data.sources import Source
from data.subwords import tokenizer_of
from data.tokenizer import (
    CHARACTERS,
    CODE_POINTS,
    CharTokenizer,
    Tokenizer,
    bpe_size,
    code_points,
)

MANY_DOCUMENTS = 100
"""With this many documents or more, the split is at the end of a document."""


@dataclass
class Scan:
    """What the first pass finds."""

    characters: int
    ends: NDArray[np.int64]
    """Where documents end, in characters."""
    alphabet: str
    """Every character of the text once, in code-point order; only for a tokenizer of characters."""


@dataclass
class Counts:
    """What the last pass has written."""

    characters: int = 0
    tokens: int = 0
    split: int = 0
    train_bytes: int = 0
    held_out_bytes: int = 0


def build(
    source: Source,
    val_fraction: float,
    building: Path,
    chosen: str | Path,
    threads: int,
    progress: Progress,
) -> None:
    """Write the files of a prepared text to the folder `building`, and flush them to the disk.

    `chosen` is the tokenizer: char, bpe:<size> or a folder. `threads` work in addition to the one
    that reads and writes. Raises DataError if the text cannot be read, or changes meanwhile.
    """
    passes = _pass_names(source, chosen)
    try:
        progress.doing(next(passes), unit="million characters")
        scan = _scan_text(source, chosen == CHARACTERS, min(threads, MOST_THREADS), progress)
        cut = _split(scan.characters, scan.ends, val_fraction)
        tokenizer = _tokenizer(chosen, source, scan, cut, progress, passes)
        progress.doing(next(passes), scan.characters)
        path = building / TOKENS
        counts, digest = _write_tokens(source, tokenizer, cut, path, threads, progress)
    except DataError as error:
        own = chosen == CHARACTERS and isinstance(error, UnknownCharacter)
        if source.is_unchanged() and not own:
            raise
        raise _changed(source) from error
    if counts.characters != scan.characters or not source.is_unchanged():
        raise _changed(source)
    info = CorpusInfo(
        source.name,
        counts.characters,
        len(scan.ends),
        counts.tokens,
        counts.split,
        counts.train_bytes,
        counts.held_out_bytes,
        end_fingerprint(digest, counts.split),
    )
    tokenizer.save(building)
    (building / INFO).write_text(json.dumps(asdict(info), indent=2) + "\n")
    for file in building.iterdir():
        with open(file, "rb") as written_file:
            os.fsync(written_file.fileno())


def _pass_names(source: Source, chosen: str | Path) -> Iterator[str]:
    ordinals = ["first", "second", "third"] if _trained_size(chosen) else ["first", "second"]
    total = {2: "two", 3: "three"}[len(ordinals)]
    return iter([f"preparing {source.name}, {ordinal} of {total} passes" for ordinal in ordinals])


def _trained_size(chosen: str | Path) -> int | None:
    return bpe_size(chosen) if isinstance(chosen, str) else None


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


def _split(characters: int, ends: NDArray[np.int64], val_fraction: float) -> int:
    """The first held-out character; with many documents, the end of one nearest to the fraction."""
    cut = int(characters * (1 - val_fraction))
    inner = ends[(ends > 0) & (ends < characters)]
    if val_fraction == ALL_HELD_OUT or len(ends) < MANY_DOCUMENTS or len(inner) == 0:
        return cut
    return int(inner[np.argmin(np.abs(inner - cut))])


def _tokenizer(
    chosen: str | Path,
    source: Source,
    scan: Scan,
    cut: int,
    progress: Progress,
    passes: Iterator[str],
) -> Tokenizer:
    """The tokenizer; one that is trained reads the training text, and no other."""
    if isinstance(chosen, Path):
        return tokenizer_of(chosen)
    if (size := _trained_size(chosen)) is None:
        return CharTokenizer(scan.alphabet)
    from data.bpe import train_bpe

    progress.doing(next(passes), cut)

    def chunks() -> Iterator[Chunk]:
        for chunk in chunks_of(source.read(), cut):
            yield chunk
            progress.done += len(chunk.text)

    return train_bpe(size, chunks(), cut)


def _write_tokens(
    source: Source,
    tokenizer: Tokenizer,
    cut: int,
    path: Path,
    threads: int,
    progress: Progress,
) -> tuple[Counts, hashlib._Hash]:
    """Last pass: encode into Arrow. Returns what was counted, and the digest of the tokens."""
    features = Features({"tokens": List(Value(tokenizer.dtype.name))})
    digest = begin_fingerprint(tokenizer)
    counts = Counts()
    with ArrowWriter(path=str(path), features=features, writer_batch_size=8) as writer:
        for part in encoded(source.read(), tokenizer, cut, threads):
            digest.update(part.tokens.data)
            writer.write({"tokens": part.tokens})
            counts.characters += part.characters
            counts.tokens += len(part.tokens)
            if part.held_out:
                counts.held_out_bytes += part.text_bytes
            else:
                counts.split += len(part.tokens)
                counts.train_bytes += part.text_bytes
            progress.done = counts.characters
        writer.finalize()
    return counts, digest
