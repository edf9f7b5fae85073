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
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from data.columns import Column
from data.errors import BrokenText, DataError
from data.pieces import Piece, pieces_of, with_final_newline
from data.progress import Progress
from data.reading.fetch import fetch_url
from data.reading.formats import format_of, mixed_formats, suffixes
from data.reading.local import (
    NamedFile,
    cannot_be_opened,
    digest_of,
    looks_like_files,
    matching_files,
    named,
    stamps_of,
)
from data.urls import redact_urls

if TYPE_CHECKING:
    from data.reading.whole import WholeTables

BUILT_IN = ("python-docs", "python-stdlib")
"""Texts that Python carries."""
TABLES_FORMAT = 2
"""Part of the key of the cache; increase it when a table would have another text."""


@dataclass(frozen=True)
class Source:
    """A corpus, which can be read any number of times."""

    name: str
    """The name for messages."""
    key: str
    """The key for the cache of prepared texts; it changes whenever the text may have changed."""
    open: Callable[[], Iterable[Piece]]
    """Returns its pieces, see the module. Raises DataError if there are none."""
    is_unchanged: Callable[[], bool] = lambda: True
    """Whether the text still has this `key`, judged by its files' metadata."""
    place: Callable[[int], str] = lambda number: f"row {number:,}"
    """Where document `number` is, counted from 1, for messages."""
    downloaded: Path | None = None
    """The file that was downloaded for it."""

    @property
    def where(self) -> str:
        """The name, and the downloaded file."""
        if self.downloaded is None:
            return self.name
        return f"{self.name} (downloaded to {self.downloaded})"

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

    def read(self) -> Iterator[Piece]:
        """Iterate over the pieces. Raises DataError if one cannot be read."""
        try:
            yield from self.open()
        except DataError:
            raise
        except Exception as error:  # unrelated types of pyarrow, pandas, zlib and the decoder
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise BrokenText(
                f"data.source={self.name} cannot be read to its end: {reason}."
            ) from error


def open_source(
    source: str, column: Column, cache_dir: Path, progress: Progress | None = None
) -> Source:
    """The corpus that `data.source` names.

    `python-docs` and `python-stdlib` come with Python. A URL is downloaded once to `cache_dir`. A
    name that exists, is a pattern or has the suffix of a text is a local file. Any other `name` or
    `owner/name` is a data set on the Hub, whose split `train` is read.

    Raises DataError if there is no such text.
    """
    progress = progress or Progress()
    if source == "python-docs":
        column.check_plain_text(source)
        return _python_docs()
    if source == "python-stdlib":
        return _files(source, named(_python_stdlib()), column, progress, cache_dir)
    if re.match(r"https?://", source, re.IGNORECASE):
        file = fetch_url(source, cache_dir, progress)
        found = _files(redact_urls(source), named([file]), column, progress, cache_dir)
        return replace(found, downloaded=file)
    if re.match(r"[a-z][a-z0-9+.-]*://", source, re.IGNORECASE):
        raise DataError(
            f"data.source={redact_urls(source)}: only http:// and https:// URLs are "
            "downloaded. Download the file by other means and give its path."
        )
    try:
        is_local = looks_like_files(source)
        files = matching_files(source) if is_local else []
    except (
        OSError,
        RuntimeError,
    ) as error:  # a name too long, an unreadable folder; an unknown ~user
        raise cannot_be_opened(source, error) from error
    if is_local:
        return _files(source, named(files), column, progress, cache_dir)
    return _hub_dataset(source, column, cache_dir, progress)


def _python_docs() -> Source:
    """The language reference as `help()` shows it: about 465,000 characters in 79 topics."""
    from pydoc_data.topics import topics

    documents = tuple(topics[name] for name in sorted(topics))
    digest = hashlib.sha256("\0".join(documents).encode())

    def read() -> Iterable[Piece]:
        return pieces_of(map(with_final_newline, documents))

    return Source("python-docs", digest.hexdigest(), read)


def _python_stdlib() -> list[Path]:
    """The standard library's modules, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if not excluded.intersection(path.relative_to(root).parts)
    ]


def _files(
    name: str,
    files: list[NamedFile],
    column: Column,
    progress: Progress,
    cache_dir: Path,
) -> Source:
    """A source of files: either texts, or tables of one format."""
    kinds = {format_of(file.name) or "text" for file in files}
    if len(kinds) > 1:
        raise mixed_formats(name, [file.name for file in files])
    if is_text := kinds == {"text"}:
        column.check_plain_text(name)
    paths = [file.path for file in files]
    stamps = stamps_of(name, paths)
    size = sum(size for size, *_ in stamps)
    if size == 0:
        raise DataError(f"data.source={name} is empty: there is no text to train on.")
    progress.doing(f"reading {name}", size)
    digest = hashlib.sha256(kinds.pop().encode())
    for file in files:
        # The format and the compression, which the name decides, are how the bytes are read.
        digest.update("".join(suffixes(file.name)[is_text:]).encode())
        digest.update(digest_of(name, file.path, progress))
    if not is_text:
        digest.update(f"{TABLES_FORMAT}\0{column.key}".encode())

    said: set[str] = set()

    def say_once(line: str) -> None:  # a text is read twice or more
        if line not in said:
            said.add(line)
            progress.say(line)

    def texts() -> Iterable[Piece]:
        from data.reading.text import text_pieces

        return text_pieces(paths, say_once)

    def tables() -> WholeTables:
        from data.reading.whole import WholeTables

        return WholeTables(name, files, column, cache_dir)

    return Source(
        name,
        digest.hexdigest(),
        texts if is_text else lambda: tables().pieces(say_once),
        lambda: stamps_of(name, paths) == stamps,
        place=lambda number: tables().place(number),
    )


def _hub_dataset(name: str, column: Column, cache_dir: Path, progress: Progress) -> Source:
    from data.reading.hub_builders import hub_pieces

    progress.doing(f"loading {name} from the Hub")
    found = hub_pieces(name, column, cache_dir, progress.say)
    if isinstance(found, list):
        return _files(name, found, column, progress, cache_dir)
    read, version = found
    digest = hashlib.sha256(f"{name}\0{version}\0{TABLES_FORMAT}\0{column.key}".encode())
    return Source(name, digest.hexdigest(), read)
