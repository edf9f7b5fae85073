"""Sources of text: `data.source` as a stream of pieces of text.

Pieces have a few MB at most if the format permits, so that a corpus of any size is read in bounded
memory.

Every document ends with a newline: one is added if it is missing. Only a corpus of one single text
file is not changed at all.

Readers are imported where they are used: most starts of a run find the text prepared, and an import
of `datasets` takes longer than all other imports.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from common.printable import redact_urls
from common.shared_files import digest_of, keep, kept
from data.columns import TextColumn
from data.errors import BrokenText, DataError
from data.pieces import Piece, pieces_of, with_final_newline
from data.progress import Progress
from data.reading.access import HTTP, Access, local_file, unreadable_file
from data.reading.content import suffixes
from data.reading.fetch import copy_files, fetch_url
from data.reading.formats import TEXT, format_of
from data.reading.groups import DataFile, Group
from data.reading.hub import NAME
from data.reading.listing import find_files, format_of_all, local_files
from data.reading.rows import Document, documents_of
from data.reading.table import PIECE_BYTES, Table

BUILT_IN = ("python-docs", "python-stdlib")
"""Texts that ship with Python."""


@dataclass(frozen=True)
class Source:
    """A corpus, which can be read any number of times."""

    name: str
    """The name for messages."""
    key: str
    """The cache key of the prepared text; it changes whenever the text may have changed."""
    tables: tuple[Table, ...] = ()
    """Its files, all of one format."""
    documents: tuple[str, ...] = ()
    """Its texts, if it has no files."""
    downloaded: Path | None = None
    """The file that was downloaded for it."""

    @property
    def where(self) -> str:
        """The name, and the downloaded file."""
        if self.downloaded is None:
            return self.name
        return f"{self.name} (downloaded to {self.downloaded})"

    @property
    def is_unchanged(self) -> bool:
        """Whether the files are still those of `key`, by size and time. Raises DataError."""
        files = [table.file for table in self.tables]
        return files == [local_file(self.name, Path(one.url), one.name) for one in files]

    def rejected(self, error: BrokenText) -> DataError:
        """The error for a text that cannot be read. Removes a downloaded file."""
        if self.downloaded is None:
            return error
        with suppress(OSError):
            self.downloaded.unlink()
        return DataError(
            f"{error} It was downloaded from data.source={self.name} to {self.downloaded}, which "
            "is removed: the next start downloads it again."
        )

    def read(self) -> Iterable[Piece]:
        """Its pieces. Raises DataError if there are none, or if one cannot be read."""
        if not self.tables:
            return pieces_of(map(with_final_newline, self.documents))
        if format_of(self.tables[0].file.name) in (None, TEXT):
            from data.reading.text import text_pieces

            return text_pieces(self.tables)
        return pieces_of(document.text for _, _, document in self._rows())

    def place(self, number: int) -> str:
        """Where document `number` is, counted from 1, for messages."""
        for table, group, document in islice(self._rows(), number - 1, None):
            return table.row_in_words(group, document.row)
        return f"conversation {number:,}"  # the files have changed

    def _rows(self) -> Iterator[tuple[Table, Group, Document]]:
        """Every row with a text. Raises DataError as reading does, and if there are no rows."""
        has_rows = False
        for table in self.tables:
            for group, document in documents_of(table):
                has_rows = True
                if document.text:
                    yield table, group, document
        if not has_rows:
            raise BrokenText(f"data.source={self.name} is empty: it has no rows.")


def open_source(
    source: str, column: TextColumn, cache_dir: Path, progress: Progress | None = None
) -> Source:
    """The corpus that `data.source` names.

    `python-docs` and `python-stdlib` come with Python. Anything else is what `find_files` finds;
    files that are not on this machine are copied to `cache_dir` once.

    Raises DataError if there is no such text.
    """
    progress = progress or Progress()
    if source == "python-docs":
        column.check_plain_text(source)
        return _python_docs()
    if source == "python-stdlib":
        return _source(source, local_files(source, _python_stdlib()), column, progress, cache_dir)
    name = redact_urls(source)
    if HTTP.match(source):  # also from a server that sends no ranges
        path = fetch_url(source, cache_dir, progress)
        read = _source(name, local_files(name, [path]), column, progress, cache_dir)
        return replace(read, downloaded=path)
    progress.doing(f"listing {name}")
    with closing(Access(cache_dir, progress.say)) as access, access.waiting.at_start():
        files = _files_here(access, source, progress)
    if NAME.fullmatch(source) and all(format_of(file.name) == TEXT for file in files):
        column.find(name, ["text"])  # the name that other readers give it
    return _source(name, files, column, progress, cache_dir)


def _files_here(access: Access, source: str, progress: Progress) -> list[DataFile]:
    """The files of a source, copied to this machine where they are remote.

    If the Hub cannot be reached, they are those of an earlier start, whose commit
    `data.cache_dir` keeps. Raises DataError if they cannot be listed or read.
    """
    record = access.cache_dir / "hub" / digest_of(source)
    try:
        commit, files = find_files(access, source, None)
    except DataError as error:
        if (earlier := kept(record)) is None:
            raise
        progress.say(f"warning: {source} is read from an earlier download: {error}")
        commit, files = find_files(access, source, earlier.decode())
    if any(file.is_remote for file in files):
        files = copy_files(access, redact_urls(source), files, progress)
    if commit is not None:
        keep(record, commit.encode())
    return files


def _python_docs() -> Source:
    """The language reference as `help()` shows it: about 465,000 characters in 79 topics."""
    from pydoc_data.topics import topics

    documents = tuple(topics[name] for name in sorted(topics))
    digest = hashlib.sha256("\0".join(documents).encode())
    return Source("python-docs", digest.hexdigest(), documents=documents)


def _python_stdlib() -> list[Path]:
    """The standard library's modules, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if not excluded.intersection(path.relative_to(root).parts)
    ]


def _source(
    name: str, files: list[DataFile], column: TextColumn, progress: Progress, cache_dir: Path
) -> Source:
    """A source of files of this machine: either texts, or tables of one format."""
    kind = format_of_all(name, files, unknown=TEXT)
    if is_text := kind == TEXT:
        column.check_plain_text(name)
    size = sum(file.size for file in files)
    if size == 0:
        raise DataError(f"data.source={name} is empty: there is no text to train on.")
    progress.doing(f"reading {name}", size)
    digest = hashlib.sha256(kind.encode())
    for file in files:
        # The name decides format and compression, and so what text the bytes are.
        digest.update("".join(suffixes(file.name)[is_text:]).encode())
        digest.update(_digest_of(name, Path(file.url), progress))
    if not is_text:
        digest.update(column.key.encode())
    access = Access(cache_dir)
    tables = tuple(Table(access, name, column, file, at) for at, file in enumerate(files))
    return Source(name, digest.hexdigest(), tables)


def _digest_of(name: str, file: Path, progress: Progress) -> bytes:
    """SHA-256 of a file; counts its bytes as progress. Raises DataError if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open(file, "rb") as opened:
            while piece := opened.read(PIECE_BYTES):
                digest.update(piece)
                progress.done += len(piece)
    except OSError as error:
        raise unreadable_file(name, file, error) from error
    return digest.digest()
