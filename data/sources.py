"""The text of a run that is prepared: `data.source` as a stream of documents, or of their parts.

Parts have a few MB at most if the format permits, so that a text of any size is read in bounded
memory. Every document ends with a newline: one is added if it is missing. Only a text of one single
text file is not changed at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from data.chunks import Part
from data.columns import TextColumn
from data.errors import BrokenText
from data.progress import Progress
from data.reading.access import Access
from data.reading.formats import TEXT
from data.reading.groups import Group, Listing
from data.reading.rows import documents, groups_of, identified, list_files, tables_of
from data.reading.table import Table
from data.reading.text import text_parts


@dataclass(frozen=True)
class Source:
    """A text, which can be read any number of times: all of its files are on this machine."""

    listing: Listing
    access: Access

    @property
    def name(self) -> str:
        """The name, without the secrets of a URL."""
        return self.listing.name

    @property
    def key(self) -> str:
        """The cache key of the prepared text; it changes whenever the text may have changed."""
        digest = hashlib.sha256(f"{self.listing.fingerprint}\0{self.listing.column}".encode())
        for file in self.listing.files:
            digest.update(f"\0{file.version}".encode())
        return digest.hexdigest()

    def read(self) -> Iterator[Part]:
        """Its documents. Raises DataError if there are none, or if one cannot be read."""
        if self.listing.format == TEXT and self.listing.column.of_texts:
            return text_parts(list(tables_of(self.listing, self.access)))
        return ((text, True) for _, _, _, text in self._rows())

    def rows(self) -> Iterator[tuple[str, str]]:
        """Every row with a text: its place for messages, and the text. Raises DataError."""
        return ((table.place(group, row), text) for table, group, row, text in self._rows())

    def _rows(self) -> Iterator[tuple[Table, Group, int, str]]:
        is_empty = True
        for table in tables_of(self.listing, self.access):
            # Without a byte there is no group: Parquet is damaged then, others have no row.
            for group in table.whole() or groups_of(table):
                for row, text in documents(table, group):
                    is_empty = False
                    yield table, group, row, text
        if is_empty:
            raise BrokenText(f"data.source={self.name} is empty: no row has a text.")


def open_source(
    source: str, column: TextColumn, cache_dir: Path, progress: Progress | None = None
) -> Source:
    """The text that `data.source` names.

    Files that are not on this machine are copied to `cache_dir` once. Raises DataError if there is
    no such text.
    """
    progress = progress or Progress()
    with closing(Access(cache_dir, progress.say)) as access, access.at_start():
        files = list_files(source, column, access, progress, copies=True)
        listing = identified(files, access)
    return Source(listing, Access(cache_dir))  # the other one is closed: all files are here
