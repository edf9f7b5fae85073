"""Look at a data set before training on it.

python -m data inspect SOURCE    list files, columns, rows, first rows and tokens
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

from common.command import EXIT_FAILED, EXIT_USER_MISTAKE, exit_code_of, say_error
from common.printable import printable
from data.columns import TextColumn
from data.errors import DataError, TextUnreachable
from data.pieces import utf8_bytes
from data.reading.access import Access
from data.reading.groups import Group
from data.reading.rows import columns_of, list_source, read_group
from data.reading.table import Table, reader_of
from data.subwords import tokenizer_of

COMMANDS = ("inspect",)
SHOWN_FILES, SHOWN_ROWS, SHOWN_CHARACTERS = 5, 3, 100
SAMPLE_BYTES = 16 << 20
"""At least this much is read to estimate tokens, if the data set has it."""


def main(arguments: list[str]) -> int:
    """Print what a source holds; the exit code: 1 if it cannot be reached, 2 for a user error."""
    options = parse(arguments)
    return exit_code_of(lambda: _inspect(options))


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; argparse exits with 2 and a usage line for a mistake."""
    parser = argparse.ArgumentParser(prog="python -m data", description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("source", metavar="SOURCE", help="data.source with data.streaming=true")
    parser.add_argument("--text-column", default="text", help="data.text_column (text)")
    parser.add_argument("--tokenizer", type=Path, help="the folder of one; without, bytes count")
    parser.add_argument(
        "--cache-dir", type=Path, default=Path("out/data"), help="data.cache_dir (out/data)"
    )
    return parser.parse_args(arguments)


def _inspect(options: argparse.Namespace) -> int:
    try:
        for line in described(options):
            print(printable(line), flush=True)
    except DataError as error:
        say_error(f"error: {error}".replace("data.text_column=", "--text-column="))
        return EXIT_FAILED if isinstance(error, TextUnreachable) else EXIT_USER_MISTAKE
    return 0


def described(options: argparse.Namespace) -> Iterator[str]:
    """Lines that describe a source. Raises DataError if it cannot be streamed."""
    column = options.text_column
    tokenizer = tokenizer_of(options.tokenizer) if options.tokenizer else None

    def say(line: str) -> None:
        print(printable(line), file=sys.stderr)

    with closing(Access(options.cache_dir, say)) as access, access.at_start():
        listing = list_source(options.source, column, access)
        files, groups = listing.files, listing.groups
        yield f"source    {listing.name}{f', commit {listing.revision}' * bool(listing.revision)}"
        size, title = sum(file.size for file in files), reader_of(listing.format).TITLE
        yield f"files     {len(files):,} of {title}, {size:,} bytes"
        for file in files[:SHOWN_FILES]:
            yield f"          {file.name}, {file.size:,} bytes"
        if len(files) > SHOWN_FILES:
            yield f"          and {len(files) - SHOWN_FILES:,} more"
        table = Table(access, listing.name, TextColumn(column), files[groups[0].file])
        kinds = (f"{name} ({kind})" for name, kind in columns_of(table).items())
        yield f"columns   {', '.join(kinds)}"
        of_groups = rows = text_bytes = tokens = 0
        for group in _spread(groups):
            found = read_group(listing, group, access, skip_broken=True)
            access.note_left_out(listing.name, [found.broken] if found.broken else [])
            for number, text in islice(enumerate(found.texts, rows + 1), max(0, SHOWN_ROWS - rows)):
                shown = text.removesuffix("\n")
                more = "..." * (len(shown) > SHOWN_CHARACTERS)
                yield f"row {number:<6}{shown[:SHOWN_CHARACTERS]}{more}"
            of_groups += group.bytes
            rows += len(found.texts)
            text_bytes += sum(map(utf8_bytes, found.texts))
            if tokenizer is not None:
                tokens += sum(len(tokenizer.encode(text)) + 1 for text in found.texts)
            if of_groups >= SAMPLE_BYTES:
                break
    of_all = sum(group.bytes for group in groups) / max(of_groups, 1)
    yield f"rows      about {rows * of_all:,.0f} with text, in {len(groups):,} groups"
    yield f"text      about {text_bytes * of_all / 1e6:,.1f} MB in column {column}"
    tokens, what = (tokens, options.tokenizer) if tokenizer else (text_bytes + rows, "bytes")
    yield f"tokens    about {tokens * of_all:,.0f} in an epoch, by {what}"


def _spread(groups: tuple[Group, ...]) -> Iterator[Group]:
    """The first group, then the one in the middle, then those between, and so on."""
    step = 1 << (len(groups) - 1).bit_length()
    yield groups[0]
    while step > 1:
        yield from groups[step // 2 :: step]
        step //= 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
