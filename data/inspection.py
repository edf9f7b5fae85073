"""What a data set holds, before anything is trained on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data.columns import TextColumn
from data.errors import DataError
from data.pieces import utf8_bytes
from data.progress import Progress
from data.reading.access import Access
from data.reading.formats import PARQUET, reader_of
from data.reading.groups import Group, Listing
from data.reading.listing import list_source
from data.reading.rows import read_group
from data.reading.table import Table
from data.subwords import tokenizer_of
from data.tokenizer import CHARACTERS, OF_BYTES, Tokenizer, bpe_size

SHOWN_FILES, SHOWN_ROWS, SHOWN_CHARACTERS = 5, 3, 100
SAMPLE_BYTES = 16 << 20
"""The least that is read to estimate tokens, unless the data set is smaller."""


@dataclass(frozen=True)
class Sample:
    """Some groups, from all over the data set."""

    of_groups: int
    """The sum of their `bytes`."""
    rows: int
    text_bytes: int
    tokens: int
    texts: list[str]
    """The first."""


def inspect(
    source: str,
    column: str,
    tokenizer: str | None,
    tokens_of_run: tuple[int, int, int],
    cache_dir: Path,
    say: Callable[[str], None] | None,
) -> Iterator[str]:
    """Lines that describe a source; `tokens_of_run` is steps, sequences of a step, and context.

    Raises DataError if it cannot be streamed.
    """
    opened = _opened(tokenizer)
    access = Access(cache_dir, say)
    try:
        listing = list_source(source, column, access)
        yield from _described(listing, access)
        with access.waiting.at_start(), Progress(say) as progress:
            progress.doing(f"reading a sample of {listing.name}")
            sample = _sample(listing, access, opened)
    finally:
        access.close()
    of_all = sum(group.bytes for group in listing.groups) / max(sample.of_groups, 1)
    if listing.format == PARQUET:
        rows = f"{sum(group.rows or 0 for group in listing.groups):,}"
    else:
        rows = f"about {sample.rows * of_all:,.0f} with text"
    yield f"rows      {rows}, in {len(listing.groups):,} groups, each of which is read at once"
    yield f"text      about {sample.text_bytes * of_all / 1e6:,.1f} MB in column {column}"
    for number, text in enumerate(sample.texts, start=1):
        text = text.removesuffix("\n")
        yield f"row {number:<6}{text[:SHOWN_CHARACTERS]}{'...' * (len(text) > SHOWN_CHARACTERS)}"
    tokens = sample.tokens * of_all
    what = f"by {tokenizer}" if tokenizer else "each a byte; --tokenizer names a tokenizer"
    yield f"tokens    about {tokens:,.0f} in an epoch, {what}"
    steps, sequences, context = tokens_of_run
    epochs = steps * sequences * context / max(tokens, 1)
    yield f"epochs    {epochs:.3g} in {steps:,} steps of {sequences:,} x {context:,} tokens"


def _described(listing: Listing, access: Access) -> Iterator[str]:
    commit = f", commit {listing.revision}" if listing.revision else ""
    yield f"source    {listing.name}{commit}"
    kind = reader_of(listing.format).title
    size = sum(file.size for file in listing.files)
    yield f"files     {len(listing.files):,} of {kind}, {size:,} bytes"
    for file in listing.files[:SHOWN_FILES]:
        yield f"          {file.name}, {file.size:,} bytes"
    if (more := len(listing.files) - SHOWN_FILES) > 0:
        yield f"          and {more:,} more"
    yield f"columns   {', '.join(_columns(listing, access))}"


def _columns(listing: Listing, access: Access) -> list[str]:
    """Name and type of each column: of Parquet from a footer, of lines from the first row."""
    file = listing.files[listing.groups[0].file]
    table = Table(access, listing.name, TextColumn(listing.column), file)
    columns = reader_of(listing.format).columns(table)
    return [f"{name} ({kind})" for name, kind in columns.items()]


def _opened(name: str | None) -> Tokenizer | None:
    """The tokenizer that is named; None if its tokens are bytes. Raises DataError."""
    if name in (None, OF_BYTES):
        return None
    if name == CHARACTERS or bpe_size(name) is not None:
        raise DataError(
            f"--tokenizer {name} would be built from the whole text, but only a sample is read. "
            f"Name a folder with a tokenizer, or {OF_BYTES}, whose tokens are bytes."
        )
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise DataError(
            f"--tokenizer {name} is not a folder. For the tokenizer of a repo, run `hf download "
            f"{name} --include 'tokenizer*' --local-dir tokenizer`, and name that folder."
        )
    return tokenizer_of(folder)


def _sample(listing: Listing, access: Access, tokenizer: Tokenizer | None) -> Sample:
    """Groups in equal distances until there are enough bytes; broken ones count nothing."""
    of_groups = rows = text_bytes = tokens = 0
    texts: list[str] = []
    for group in _spread(listing.groups):
        found = read_group(listing, group, access, skip_broken=True)
        access.note_left_out(listing.name, found.left_out)
        if not found.texts:
            continue
        texts += found.texts[: SHOWN_ROWS - len(texts)]
        of_groups += group.bytes
        rows += len(found.texts)
        text_bytes += sum(utf8_bytes(text) for text in found.texts)
        if tokenizer is not None:
            tokens += sum(len(tokenizer.encode(text)) + 1 for text in found.texts)
        if of_groups >= SAMPLE_BYTES:
            break
    return Sample(of_groups, rows, text_bytes, tokens if tokenizer else text_bytes + rows, texts)


def _spread(groups: tuple[Group, ...]) -> Iterator[Group]:
    """The first group, then those between the ones before, until all have come."""
    step = 1 << (len(groups) - 1).bit_length()
    yield groups[0]
    while step > 1:
        yield from groups[step // 2 :: step]
        step //= 2
