"""Look at a data set before training on it.

python -m data inspect SOURCE    list files, rows, columns, first rows, tokens and epochs
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from common.printable import printable
from data.columns import TextColumn
from data.command import EXIT_FAILED, EXIT_USER_MISTAKE, exit_code_of, say_error
from data.errors import DataError, TextUnreachable
from data.pieces import utf8_bytes
from data.progress import Progress
from data.reading.access import Access
from data.reading.groups import Group, Listing
from data.reading.rows import list_source, read_group
from data.reading.table import Table, reader_of
from data.subwords import tokenizer_of
from data.tokenizer import CHARACTERS, OF_BYTES, Tokenizer, bpe_size

COMMANDS = ("inspect",)
ARGUMENTS = {"data.text_column": "--text-column", "data.source": "SOURCE"}
"""The arguments that stand for keys in messages."""
SHOWN_FILES, SHOWN_ROWS, SHOWN_CHARACTERS = 5, 3, 100
SAMPLE_BYTES = 16 << 20
"""At least this much is read to estimate tokens, if the data set has it."""


def main(arguments: list[str]) -> int:
    """Print what a source holds; the exit code: 1 if it cannot be reached, 2 for a user error."""
    options = parse(arguments)
    return exit_code_of(lambda: _inspect(options))


def _inspect(options: argparse.Namespace) -> int:
    try:
        for line in described(options, lambda line: print(printable(line), file=sys.stderr)):
            print(printable(line), flush=True)
    except DataError as error:
        message = str(error)
        for key, argument in ARGUMENTS.items():
            message = message.replace(f"{key}=", f"{argument}=")
        say_error(message)
        return EXIT_FAILED if isinstance(error, TextUnreachable) else EXIT_USER_MISTAKE
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; argparse exits with 2 and a usage line for a mistake."""
    parser = argparse.ArgumentParser(prog="python -m data", description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("source", metavar="SOURCE", help="as data.source with data.streaming=true")
    parser.add_argument("--text-column", default="text", help="data.text_column (default: text)")
    parser.add_argument(
        "--tokenizer", help=f"a folder with a tokenizer; default {OF_BYTES}, whose tokens are bytes"
    )
    for key, default in (("max-steps", 1200), ("global-batch-size", 12), ("block-size", 64)):
        parser.add_argument(f"--{key}", type=int, default=default, help=f"default: {default}")
    parser.add_argument(
        "--cache-dir", type=Path, default=Path("out/data"), help="data.cache_dir (out/data)"
    )
    return parser.parse_args(arguments)


@dataclass(frozen=True)
class Sample:
    """Some groups, from all over the data set."""

    of_groups: int
    """The sum of their `bytes`."""
    rows: int
    text_bytes: int
    tokens: int
    texts: list[str]
    """The first ones."""


def described(options: argparse.Namespace, say: Callable[[str], None]) -> Iterator[str]:
    """Lines that describe a source. Raises DataError if it cannot be streamed."""
    column, tokenizer = options.text_column, options.tokenizer
    opened = _opened(tokenizer)
    access = Access(options.cache_dir, say)
    try:
        listing = list_source(options.source, column, access)
        yield from _files_and_columns(listing, access)
        with access.at_start(), Progress(say) as progress:
            progress.doing(f"reading a sample of {listing.name}")
            sample = _sample(listing, access, opened)
    finally:
        access.close()
    of_all = sum(group.bytes for group in listing.groups) / max(sample.of_groups, 1)
    counts = [group.rows for group in listing.groups if group.rows is not None]
    if len(counts) == len(listing.groups):
        rows = f"{sum(counts):,}"
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
    steps, sequences = options.max_steps, options.global_batch_size
    context = options.block_size
    epochs = steps * sequences * context / max(tokens, 1)
    yield f"epochs    {epochs:.3g} in {steps:,} steps of {sequences:,} x {context:,} tokens"


def _files_and_columns(listing: Listing, access: Access) -> Iterator[str]:
    commit = f", commit {listing.revision}" if listing.revision else ""
    yield f"source    {listing.name}{commit}"
    kind = reader_of(listing.format).TITLE
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
    folder = Path(name)
    with suppress(RuntimeError):  # the home of an unknown user
        folder = folder.expanduser()
    if not folder.is_dir():
        raise DataError(
            f"--tokenizer {name} is not a folder. For the tokenizer of a repo, run `hf download "
            f"{name} --include 'tokenizer*' --local-dir tokenizer`, and name that folder."
        )
    return tokenizer_of(folder)


def _sample(listing: Listing, access: Access, tokenizer: Tokenizer | None) -> Sample:
    """Read groups from all over the data set until there are enough bytes; skip broken ones."""
    of_groups = rows = text_bytes = tokens = 0
    texts: list[str] = []
    for group in _spread(listing.groups):
        found = read_group(listing, group, access, skip_broken=True)
        if found.broken:
            access.note_left_out(listing.name, [found.broken])
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
    """The first group, then the one in the middle, then those between, and so on."""
    step = 1 << (len(groups) - 1).bit_length()
    yield groups[0]
    while step > 1:
        yield from groups[step // 2 :: step]
        step //= 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
