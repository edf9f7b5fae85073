"""Preparation of a text in passes and bounded memory: the folder that `data.corpus` loads.

Vocabulary, split and fingerprint depend on the text alone; tokens are written to an Arrow file.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.chat import TRAINING_DATE, ChatTemplate, no_template
from data.conversations import encoded_chats
from data.encode import MOST_THREADS, Encoded, encoded, in_order
from data.errors import BrokenText, DataError, UnknownCharacter
from data.pieces import Chunk, Piece, chunks_of
from data.prepared import ALL_HELD_OUT, INFO
from data.progress import Progress
from data.sources import Source
from data.subwords import tokenizer_of
from data.token_writer import TokenWriter
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


def build(
    source: Source,
    val_fraction: float,
    building: Path,
    chosen: str | Path,
    longest: int | None,
    threads: int,
    progress: Progress,
) -> None:
    """Write the files of a prepared text to the folder `building`, and flush them to the disk.

    `chosen` is the tokenizer: char, bpe:<size> or a folder. With `longest` the documents are
    conversations, of at most so many tokens. `threads` work in addition to the one that reads and
    writes. Raises DataError if the text cannot be read, or changes meanwhile.
    """
    passes = _pass_names(source, chosen)
    template = None if longest is None else _template(chosen)
    try:
        progress.doing(next(passes), unit="million characters")
        scan = _scan_text(source, chosen == CHARACTERS, min(threads, MOST_THREADS), progress)
        cut = _split(scan, val_fraction, source, only_ends=longest is not None)
        tokenizer = _tokenizer(chosen, source, scan, cut, progress, passes)
        progress.doing(next(passes), scan.characters)
        parts: Iterator[Encoded]
        if template is None or longest is None:
            parts = encoded(source.read(), tokenizer, cut, threads)
        else:
            parts = encoded_chats(source.read(), template, cut, longest, source)
        writer = _write_tokens(parts, building, tokenizer, template is not None, progress)
    except DataError as error:
        own = chosen == CHARACTERS and isinstance(error, UnknownCharacter)
        if source.is_unchanged() and not own:
            raise
        raise _changed(source) from error
    if writer.characters != scan.characters or not source.is_unchanged():
        raise _changed(source)
    info = writer.info(source.name)
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


def _split(scan: Scan, val_fraction: float, source: Source, only_ends: bool) -> int:
    """The first held-out character; with many documents, the end of one nearest to the fraction.

    With `only_ends` always that, because a conversation cannot be cut. Raises DataError for one
    conversation alone.
    """
    cut = int(scan.characters * (1 - val_fraction))
    inner = scan.ends[(scan.ends > 0) & (scan.ends < scan.characters)]
    if val_fraction == ALL_HELD_OUT:
        return 0
    if only_ends and len(inner) == 0:
        raise DataError(
            f"data.source={source.name} has one conversation. Use two or more: some are held out."
        )
    if not only_ends and (len(scan.ends) < MANY_DOCUMENTS or len(inner) == 0):
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
    parts: Iterator[Encoded],
    building: Path,
    tokenizer: Tokenizer,
    has_targets: bool,
    progress: Progress,
) -> TokenWriter:
    """Last pass: encode into Arrow. Returns the writer, which has counted."""
    with TokenWriter(building, tokenizer, has_targets) as writer:
        for part in parts:
            writer.add(part)
            progress.done = writer.characters
    return writer


def _template(chosen: str | Path) -> ChatTemplate:
    """The chat template of a tokenizer. Raises DataError if it has none."""
    where = f"data.tokenizer={chosen}"
    if isinstance(chosen, Path):
        return ChatTemplate(tokenizer_of(chosen), where, TRAINING_DATE)
    raise no_template(where)
