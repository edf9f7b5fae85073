"""What is known of a data set before any row is read: files, and groups of rows in them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from data.columns import TextColumn
from data.reading.formats import format_of, suffixes

TRAIN = "train"
"""The split of a data set that is trained on."""
URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
HTTP = re.compile(r"https?://", re.IGNORECASE)
HUB_URL = "hf://datasets/"
HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*(/\w[\w.-]*)?)(@(?P<revision>[\w./-]+))?", re.ASCII)
"""`owner/name@revision`; a relative path of two names looks the same."""


def is_hub_name(source: str) -> bool:
    """Whether a source reads as a name on the Hub: not if it has the extension of a data file."""
    name = HUB_NAME.fullmatch(source)
    return name is not None and not (format_of(name["name"]) or suffixes(name["name"])[1])


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of a data set."""

    path: str
    """In its file system; a URL on the Hub, with the commit, or of a server."""
    name: str
    """The name within the data set, which identifies its rows on every machine."""
    size: int
    """Bytes; 0 behind a URL that has not been downloaded."""
    version: str
    """Changes when the content does: an id of the Hub, an etag, or size and time."""
    system: AbstractFileSystem | None = None
    """The disk or the store that holds it; None on the Hub and on a server."""

    @property
    def is_remote(self) -> bool:
        """Whether it is read over a network."""
        return not isinstance(self.system, LocalFileSystem)


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that are read at once: a row group of Parquet, whole lines of JSON, or a whole file.

    A text, a CSV file, a JSON array and a compressed file are one group each.
    """

    file: int
    """The index of its file in the listing."""
    index: int
    """The index of the group in its file."""
    first_row: int | None
    """How many rows are before it in the file; None if rows are counted by group."""
    rows: int | None
    """Number of rows; None if it is not known before they are read."""
    begin: int
    """The first byte that is read. If `rows` is None, it has the rows that begin in begin..end."""
    end: int
    """The byte after the last."""
    bytes: int
    """About how much memory its text takes; for Parquet, the column's uncompressed size."""


@dataclass(frozen=True)
class Listing:
    """All files and groups of a data set at one revision, in the same order on every machine."""

    name: str
    """`data.source` as it was written, without secrets."""
    revision: str | None
    """The commit of a data set of the Hub."""
    format: str
    """The module of this package that reads its files."""
    column: TextColumn
    """The column that holds the text."""
    files: tuple[DataFile, ...]
    groups: tuple[Group, ...]
    """None of a text that is prepared: its files are read whole."""
    fingerprint: str
    """Hex digest: equal on every machine that has the same data set, wherever its files are."""
