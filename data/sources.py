"""Where text comes from: what `data.source` names, as a stream of pieces of text.

A source is an `IterableDataset` with the columns `text` (a piece of the corpus, in order) and
`ends` (the offsets in the piece, in characters, at which a document ends). Pieces are a few MB at
most where the format allows, so that a corpus of any size passes through in bounded memory.

Every document ends with a newline: one is added where it is missing. Only a corpus that is one
single text file is taken to the letter.

What reads a text is imported where it is read: most starts of a run find it prepared, and
`datasets` takes longer to import than all the rest of them.
"""

from __future__ import annotations

import glob
import hashlib
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data.errors import DataError
from data.fetch import fetched
from data.formats import TABLE_READERS, TEXT_SUFFIXES, suffixes

if TYPE_CHECKING:
    from datasets import IterableDataset


@dataclass(frozen=True)
class Source:
    """A corpus that can be read any number of times."""

    name: str
    """As a person calls it."""
    key: str
    """Changes whenever the text may have changed; what preparation is cached by."""
    open: Callable[[], IterableDataset]
    """Columns `text` and `ends`, see the module. Raises DataError where there are none."""

    def read(self) -> Iterator[dict]:
        """The pieces, from the first. Raises DataError where one cannot be read."""
        try:
            yield from self.open()
        except DataError:
            raise
        except Exception as error:  # pyarrow's, pandas', zlib's, the decoder's own types
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(
                f"data.source={self.name} cannot be read to its end: {reason}"
            ) from error


def open_source(source: str, text_column: str, cache_dir: Path) -> Source:
    """The corpus that `data.source` names.

    `python-docs` and `python-stdlib` come with Python. A URL is fetched once into `cache_dir`. What
    looks like a file (it exists, or is a pattern, or ends like a text) is read from this disk, and
    anything else of the form `name` or `owner/name` is a data set on the Hub, of which the split
    `train` is read.

    Raises DataError when there is no such text.
    """
    if source == "python-docs":
        return _python_docs()
    if source == "python-stdlib":
        return _files(source, _python_stdlib(), text_column)
    if re.match(r"https?://", source):
        return _files(source, [fetched(source, cache_dir)], text_column)
    if _looks_like_files(source):
        return _files(source, _matching_files(source), text_column)
    return _hub_dataset(source, text_column)


def _python_docs() -> Source:
    """The language reference as `help()` shows it: about 465,000 characters in 79 topics."""
    from pydoc_data.topics import topics

    documents = tuple(topics[name] for name in sorted(topics))
    digest = hashlib.sha256("\0".join(documents).encode())

    def read() -> IterableDataset:
        from data.texts import document_pieces

        return document_pieces(documents)

    return Source("python-docs", digest.hexdigest(), read)


def _python_stdlib() -> list[Path]:
    """The standard library's modules, without tests and without what was installed beside them."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if not left_out.intersection(path.relative_to(root).parts)
    ]


def _looks_like_files(source: str) -> bool:
    suffix, compression = suffixes(source)
    return (
        Path(source).expanduser().exists()
        or any(mark in source for mark in "*?[")
        or source.startswith(("/", "./", "../", "~"))
        or compression != ""
        or suffix in (*TEXT_SUFFIXES, *TABLE_READERS)
        or re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) is None
    )


def _matching_files(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_dir():
        raise DataError(
            f"data.source={source} is a directory. Name the files in it, for example "
            f"'data.source=\"{source.rstrip('/')}/*.txt\"'."
        )
    if path.exists():
        return [path]
    if not any(mark in source for mark in "*?["):
        raise DataError(f"data.source={source}: there is no such file. Check the path.")
    files = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
    files = [file for file in files if file.is_file()]
    if not files:
        raise DataError(
            f"data.source={source} matches no file. Check the pattern; ** matches folders too."
        )
    return files


def _files(name: str, files: list[Path], text_column: str) -> Source:
    """All files must be texts, or all tables of one format."""
    readers = {TABLE_READERS.get(suffixes(str(file))[0], "text") for file in files}
    if len(readers) > 1:
        raise DataError(
            f"data.source={name} mixes formats ({', '.join(sorted(readers))}). "
            "Name files of one format."
        )
    reader = readers.pop()
    digest = hashlib.sha256(reader.encode())
    for file in files:
        try:
            with open(file, "rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
        except OSError as error:
            raise DataError(f"data.source={name}: cannot read {file}: {error.strerror}.") from error
    if not any(file.stat().st_size for file in files):
        raise DataError(f"data.source={name} is empty: there is no text to train on.")
    if reader != "text":
        digest.update(text_column.encode())

    def read() -> IterableDataset:
        from data.tables import table_pieces
        from data.texts import text_pieces

        if reader == "text":
            return text_pieces(files)
        return table_pieces(name, reader, files, text_column)

    return Source(name, digest.hexdigest(), read)


def _hub_dataset(name: str, text_column: str) -> Source:
    from data.tables import hub_pieces

    pieces, version = hub_pieces(name, text_column)
    digest = hashlib.sha256(f"{name}\0{version}\0{text_column}".encode())
    return Source(name, digest.hexdigest(), lambda: pieces)
