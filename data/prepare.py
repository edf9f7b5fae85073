"""Preparation of a text in two passes and bounded memory: the folder that `data.corpus` loads.

Vocabulary, split and fingerprint depend on the text alone; tokens are written to an Arrow file.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import numpy as np
from datasets import Features, List, Value
from datasets.arrow_writer import ArrowWriter
from numpy.typing import NDArray

from data.errors import BrokenText, DataError
from data.pieces import Piece
from data.prepared import INFO, TOKENS, CorpusInfo, begin_fingerprint, end_fingerprint
from data.progress import Progress
from data.sources import Source
from data.tokenizer import CODE_POINTS, CharTokenizer, code_points

MANY_DOCUMENTS = 100
"""With this many documents or more, the split is at the end of a document."""
MOST_THREADS = 4
"""More threads would wait for the one that reads."""
Item = TypeVar("Item")
Result = TypeVar("Result")


def build(
    source: Source, val_fraction: float, building: Path, threads: int, progress: Progress
) -> None:
    """Write the files of a prepared text to the folder `building`, and flush them to the disk.

    `threads`, at most `MOST_THREADS`, encode the text, in addition to the one that reads and
    writes. Raises DataError if the text cannot be read, or changes meanwhile.
    """
    threads = min(threads, MOST_THREADS)
    try:
        tokenizer, ends, characters = _scan_text(source, threads, progress)
        cut = _split(characters, ends, val_fraction)
        progress.doing(f"preparing {source.name}, second of two passes", characters)
        written, digest = _write_tokens(source, tokenizer, building / TOKENS, threads, progress)
    except DataError as error:
        if source.is_unchanged():
            raise
        raise _changed(source) from error
    if written != characters or not source.is_unchanged():
        raise _changed(source)
    fingerprint = end_fingerprint(digest, cut)
    info = CorpusInfo(source.name, characters, len(ends), cut, fingerprint)
    tokenizer.save(building)
    (building / INFO).write_text(json.dumps(asdict(info), indent=2) + "\n")
    for file in building.iterdir():
        with open(file, "rb") as written_file:
            os.fsync(written_file.fileno())


def _changed(source: Source) -> DataError:
    return DataError(
        f"data.source={source.name} changed while it was read. Start again when no process "
        "writes to it any more, or use a copy of it."
    )


def _in_order(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int
) -> Iterator[Result]:
    """`map` of a function over items, in order, by several threads.

    At most `threads` + 1 items are in memory. numpy and hashlib release the interpreter lock.
    """
    running: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            running.append(pool.submit(function, item))
            if len(running) > threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def _scan_text(
    source: Source, threads: int, progress: Progress
) -> tuple[CharTokenizer, NDArray[np.int64], int]:
    """First pass: the vocabulary, where documents end, and how many characters there are."""
    progress.doing(f"preparing {source.name}, first of two passes", unit="million characters")
    seen = np.zeros(CODE_POINTS, dtype=bool)

    def scan(piece: Piece) -> tuple[int, list[int]]:
        points = code_points(piece["text"])
        if not seen[points].all():  # reading is faster than writing
            seen[points] = True  # safe: all threads write the same value
        return len(points), piece["ends"]

    ends = array("q")
    characters = 0
    for length, piece_ends in _in_order(scan, source.read(), threads):
        ends.extend(characters + end for end in piece_ends)
        characters += length
        progress.done = characters
    if characters == 0:
        raise BrokenText(f"data.source={source.name} is empty: there is no text to train on.")
    tokenizer = CharTokenizer("".join(map(chr, np.flatnonzero(seen))))
    return tokenizer, np.array(ends, dtype=np.int64), characters


def _split(characters: int, ends: NDArray[np.int64], val_fraction: float) -> int:
    """The first held-out character; with many documents, the end of one nearest to the fraction."""
    cut = int(characters * (1 - val_fraction))
    inner = ends[(ends > 0) & (ends < characters)]
    if len(ends) < MANY_DOCUMENTS or len(inner) == 0:
        return cut
    return int(inner[np.argmin(np.abs(inner - cut))])


def _write_tokens(
    source: Source, tokenizer: CharTokenizer, path: Path, threads: int, progress: Progress
) -> tuple[int, hashlib._Hash]:
    """Second pass: encode into Arrow. Returns the number of tokens and their digest."""
    features = Features({"tokens": List(Value(tokenizer.dtype.name))})
    digest = begin_fingerprint(tokenizer)
    written = 0

    def encode(piece: Piece) -> NDArray:
        try:
            return tokenizer.encode(piece["text"])
        except DataError as error:  # a character that the first pass did not see
            raise _changed(source) from error

    with ArrowWriter(path=str(path), features=features, writer_batch_size=8) as writer:
        for tokens in _in_order(encode, source.read(), threads):
            digest.update(tokens.data)
            writer.write({"tokens": tokens})
            written += len(tokens)
            progress.done = written
        writer.finalize()
    return written, digest
