"""Sources of text: `data.source` as a stream of documents, or of parts of long ones.

Parts have a few MB at most if the format permits, so that a corpus of any size is read in bounded
memory.

Every document ends with a newline: one is added if it is missing. Only a corpus of one single text
file is not changed at all.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from common.printable import redact_urls
from common.shared_files import digest_of, keep, kept
from data.chunks import Part, with_final_newline
from data.columns import MESSAGES, TextColumn
from data.errors import BrokenText, DataError
from data.progress import Progress
from data.reading.access import HTTP, Access
from data.reading.copies import copy_files, unlisted_url
from data.reading.files import find_files, format_of_all, local_file, local_files
from data.reading.formats import TEXT, format_of, suffixes
from data.reading.groups import DataFile
from data.reading.rows import content_of, documents
from data.reading.table import Table
from data.reading.text import text_parts

BUILT_IN = ("python-docs", "python-stdlib")
"""Texts that ship with Python."""


@dataclass(frozen=True)
class Source:
    """A corpus, which can be read any number of times."""

    name: str
    """The name, without the secrets of a URL."""
    where: str
    """The name for messages: of a URL with the file that it was downloaded to."""
    key: str
    """The cache key of the prepared text; it changes whenever the text may have changed."""
    tables: tuple[Table, ...] = ()
    """Its files, all of one format."""
    documents: tuple[str, ...] = ()
    """Its texts, if it has no files."""

    @property
    def is_unchanged(self) -> bool:
        """Whether the files are still those of `key`, by size, time and inode. Raises DataError."""
        files = [table.file for table in self.tables]
        return files == [local_file(self.name, Path(file.url), file.name) for file in files]

    def read(self) -> Iterator[Part]:
        """Its documents. Raises DataError if there are none, or if one cannot be read."""
        if not self.tables:
            return ((with_final_newline(text), True) for text in self.documents)
        if format_of(self.tables[0].file.name) in (None, TEXT):
            return text_parts(self.tables)
        return ((text, True) for _, _, text in self._rows())

    def place(self, number: int) -> str:
        """Where document `number` is, counted from 1, for messages."""
        for table, row, _ in islice(self._rows(), number - 1, None):
            return f"row {row:,} of {table.file.name}"
        return f"conversation {number:,}"  # the files have changed

    def _rows(self) -> Iterator[tuple[Table, int, str]]:
        """Every row with a text, and its number in its file. Raises DataError for none."""
        has_rows = False
        for table in self.tables:
            for group in table.whole():
                for row, text in documents(table, group):
                    has_rows = True
                    yield table, row, text
        if not has_rows:
            raise BrokenText(f"data.source={self.where} is empty: it has no rows.")


def open_source(
    source: str, column: TextColumn, cache_dir: Path, progress: Progress | None = None
) -> Source:
    """The corpus that `data.source` names.

    `python-docs` and `python-stdlib` come with Python. Anything else is what `find_files` finds;
    files that are not on this machine are copied to `cache_dir` once.

    Raises DataError if there is no such text.
    """
    progress = progress or Progress()
    name = where = redact_urls(source)
    if source == "python-docs":
        from pydoc_data.topics import topics  # 79 topics, about 465,000 characters

        _check_has_rows(name, column)
        texts = tuple(topics[topic] for topic in sorted(topics))
        key = hashlib.sha256("\0".join(texts).encode()).hexdigest()
        return Source(name, name, key, documents=texts)
    with closing(Access(cache_dir, progress.say)) as access, access.at_start():
        progress.doing(f"listing {name}")
        if source == "python-stdlib":
            files = local_files(source, _python_stdlib())
        else:
            files = _files_here(access, source, progress)
        if HTTP.match(source):
            copy = files[0].url
            where = f"{name} (downloaded to {copy}; remove that file to download it again)"
        if (kind := format_of_all(name, files, unknown=TEXT)) == TEXT:
            _check_has_rows(name, column)
        if not any(file.size for file in files):
            raise DataError(f"data.source={where} is empty: there is no text to train on.")
        digest = hashlib.sha256(f"{kind}\0{column if kind != TEXT else ''}".encode())
        for file in files:
            # The name decides the compression, and so what text the bytes are.
            parts = suffixes(file.name)[1], file.version, content_of(access, name, file)
            digest.update("\0".join(parts).encode())
    reading = Access(cache_dir)  # the other one is closed: all files are here
    tables = tuple(Table(reading, where, column, file, at) for at, file in enumerate(files))
    return Source(name, where, digest.hexdigest(), tables)


def _check_has_rows(name: str, column: TextColumn) -> None:
    if not column.of_texts:
        raise DataError(
            f"data.documents=conversations needs rows with {MESSAGES}, and data.source={name} is "
            "plain text. Name JSON lines, Parquet or a data set of the Hub."
        )


def _files_here(access: Access, source: str, progress: Progress) -> list[DataFile]:
    """The files of a source, copied to this machine where they are remote.

    If the Hub cannot be reached, they are those of an earlier start, whose commit
    `data.cache_dir` keeps. Raises DataError if they cannot be listed or read.
    """
    if HTTP.match(source):
        return copy_files(access, redact_urls(source), [unlisted_url(source)], progress)
    record = access.cache_dir / "hub" / digest_of(source)
    try:
        commit, files = find_files(access, source)
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


def _python_stdlib() -> list[Path]:
    """The standard library's modules, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
    return [
        path
        for path in root.rglob("*.py")
        if not excluded.intersection(path.relative_to(root).parts)
    ]
