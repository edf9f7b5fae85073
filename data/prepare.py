"""A text made into the folder that `data.corpus` loads, in two passes and bounded memory.

Vocabulary, split and fingerprint follow from the text alone; tokens go into an Arrow file.
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
"""From this many documents on, whole ones are held out."""
MOST_THREADS = 4
"""More would wait for the one that reads."""
Item = TypeVar("Item")
Result = TypeVar("Result")


def build(
    opened: Source, val_fraction: float, building: Path, threads: int, progress: Progress
) -> None:
    """Write the files of a prepared text into the folder `building`, and to the disk.

    `threads`, up to `MOST_THREADS`, look characters up, beside the one that reads and writes.
    Raises DataError where the text cannot be read, or changes while it is.
    """
    threads = min(threads, MOST_THREADS)
    try:
        tokenizer, ends, characters = _survey(opened, threads, progress)
        cut = _split(characters, ends, val_fraction)
        progress.doing(f"preparing {opened.name}, second of two passes", characters)
        written, digest = _write_tokens(opened, tokenizer, building / TOKENS, threads, progress)
    except DataError as error:
        if opened.is_unchanged():
            raise
        raise _changed(opened) from error
    if written != characters or not opened.is_unchanged():
        raise _changed(opened)
    fingerprint = end_fingerprint(digest, cut)
    info = CorpusInfo(opened.name, characters, len(ends), cut, fingerprint)
    tokenizer.save(building)
    (building / INFO).write_text(json.dumps(asdict(info), indent=2) + "\n")
    for file in building.iterdir():
        with open(file, "rb") as written_file:
            os.fsync(written_file.fileno())


def _changed(opened: Source) -> DataError:
    return DataError(
        f"data.source={opened.name} changed while it was read. Start again when nothing writes "
        "to it any more, or give a copy of it."
    )


def _in_order(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int
) -> Iterator[Result]:
    """The function of each item, in their order, by so many threads at once.

    As many items are held as threads, and one more. numpy and hashes let other threads run.
    """
    running: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            running.append(pool.submit(function, item))
            if len(running) > threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def _survey(
    opened: Source, threads: int, progress: Progress
) -> tuple[CharTokenizer, NDArray[np.int64], int]:
    """First pass: the vocabulary, where documents end, and how many characters there are."""
    progress.doing(f"preparing {opened.name}, first of two passes", unit="million characters")
    seen = np.zeros(CODE_POINTS, dtype=bool)

    def look(piece: Piece) -> tuple[int, list[int]]:
        points = code_points(piece["text"])
        if not seen[points].all():  # to look is faster than to write
            seen[points] = True  # all threads write the same
        return len(points), piece["ends"]

    ends = array("q")
    characters = 0
    for length, piece_ends in _in_order(look, opened.read(), threads):
        ends.extend(characters + end for end in piece_ends)
        characters += length
        progress.done = characters
    if characters == 0:
        raise BrokenText(f"data.source={opened.name} is empty: there is no text to train on.")
    tokenizer = CharTokenizer("".join(map(chr, np.flatnonzero(seen))))
    return tokenizer, np.array(ends, dtype=np.int64), characters


def _split(characters: int, ends: NDArray[np.int64], val_fraction: float) -> int:
    """The first held-out character; of many documents, the end of one nearest to the fraction."""
    cut = int(characters * (1 - val_fraction))
    inner = ends[(ends > 0) & (ends < characters)]
    if len(ends) < MANY_DOCUMENTS or len(inner) == 0:
        return cut
    return int(inner[np.argmin(np.abs(inner - cut))])


def _write_tokens(
    opened: Source, tokenizer: CharTokenizer, path: Path, threads: int, progress: Progress
) -> tuple[int, hashlib._Hash]:
    """Second pass: encode into Arrow. Returns how many tokens, and a digest of them."""
    features = Features({"tokens": List(Value(tokenizer.dtype.name))})
    digest = begin_fingerprint(tokenizer)
    written = 0

    def encode(piece: Piece) -> NDArray:
        try:
            return tokenizer.encode(piece["text"])
        except DataError as error:  # of a character that was not there before
            raise _changed(opened) from error

    with ArrowWriter(path=str(path), features=features, writer_batch_size=8) as writer:
        for tokens in _in_order(encode, opened.read(), threads):
            digest.update(tokens.data)
            writer.write({"tokens": tokens})
            written += len(tokens)
            progress.done = written
        writer.finalize()
    return written, digest
