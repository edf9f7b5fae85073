"""Where text comes from: what `data.source` names, as a stream of pieces of text.

Pieces are a few MB at most where the format allows, so that a corpus of any size passes through in
bounded memory.

Every document ends with a newline: one is added where it is missing. Only a corpus that is one
single text file is taken to the letter.

What reads a text is imported where it is read: most starts of a run find it prepared, and
`datasets` takes longer to import than all the rest of them.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from data.errors import BrokenText, DataError
from data.fetch import fetched
from data.files import digest_of, looks_like_files, matching_files, stamps_of
from data.formats import TABLE_READERS, suffixes
from data.pieces import Piece
from data.progress import Progress
from data.urls import redact_urls


@dataclass(frozen=True)
class Source:
    """A corpus that can be read any number of times."""

    name: str
    """As a person calls it."""
    key: str
    """Changes whenever the text may have changed; what preparation is cached by."""
    open: Callable[[], Iterable[Piece]]
    """Its pieces, see the module. Raises DataError where there are none."""
    is_unchanged: Callable[[], bool] = lambda: True
    """Whether the text is still the one of `key`, as far as its files tell without reading them."""
    fetched: Path | None = None
    """The file that was fetched for it."""

    @property
    def where(self) -> str:
        """The name, and what it was fetched into."""
        return self.name if self.fetched is None else f"{self.name} (fetched into {self.fetched})"

    def refused(self, error: BrokenText) -> DataError:
        """What to say of a text that cannot be read. A download of it is not kept."""
        if self.fetched is None:
            return error
        with suppress(OSError):
            self.fetched.unlink()
        return DataError(
            f"{error} It was fetched from data.source={self.name} into {self.fetched}, which is "
            "removed: the next start fetches it again."
        )

    def read(self) -> Iterator[Piece]:
        """The pieces, from the first. Raises DataError where one cannot be read."""
        try:
            yield from self.open()
        except DataError:
            raise
        except Exception as error:  # pyarrow's, pandas', zlib's, the decoder's own types
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise BrokenText(
                f"data.source={self.name} cannot be read to its end: {reason}."
            ) from error


def open_source(
    source: str, text_column: str, cache_dir: Path, progress: Progress | None = None
) -> Source:
    """The corpus that `data.source` names.

    `python-docs` and `python-stdlib` come with Python. A URL is fetched once into `cache_dir`. What
    looks like a file (it exists, or is a pattern, or ends like a text) is read from this disk, and
    anything else of the form `name` or `owner/name` is a data set on the Hub, of which the split
    `train` is read.

    Raises DataError when there is no such text.
    """
    progress = progress or Progress()
    if source == "python-docs":
        return _python_docs()
    if source == "python-stdlib":
        return _files(source, _python_stdlib(), text_column, progress)
    if re.match(r"https?://", source, re.IGNORECASE):
        file = fetched(source, cache_dir, progress)
        return replace(_files(redact_urls(source), [file], text_column, progress), fetched=file)
    if re.match(r"[a-z][a-z0-9+.-]*://", source, re.IGNORECASE):
        raise DataError(
            f"data.source={redact_urls(source)}: only http:// and https:// addresses are "
            "fetched. Fetch the file by other means and give its path."
        )
    try:
        is_local = looks_like_files(source)
        files = matching_files(source) if is_local else []
    except (OSError, RuntimeError) as error:  # a name too long, folders closed to us; no such ~user
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise DataError(f"data.source={source} cannot be opened: {reason}. Check it.") from error
    if is_local:
        return _files(source, files, text_column, progress)
    return _hub_dataset(source, text_column, cache_dir, progress)


def _python_docs() -> Source:
    """The language reference as `help()` shows it: about 465,000 characters in 79 topics."""
    from pydoc_data.topics import topics

    documents = tuple(topics[name] for name in sorted(topics))
    digest = hashlib.sha256("\0".join(documents).encode())

    def read() -> Iterable[Piece]:
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


def _files(name: str, files: list[Path], text_column: str, progress: Progress) -> Source:
    """All files must be texts, or all tables of one format."""
    readers = {TABLE_READERS.get(suffixes(str(file))[0], "text") for file in files}
    if len(readers) > 1:
        raise DataError(
            f"data.source={name} mixes formats ({', '.join(sorted(readers))}). "
            "Name files of one format."
        )
    reader = readers.pop()
    stamps = stamps_of(name, files)
    size = sum(size for size, *_ in stamps)
    if size == 0:
        raise DataError(f"data.source={name} is empty: there is no text to train on.")
    progress.doing(f"reading {name}", size)
    digest = hashlib.sha256(reader.encode())
    for file in files:
        # The same bytes are another text, or none, when a name says that they are compressed.
        digest.update(suffixes(str(file))[1].encode())
        digest.update(digest_of(name, file, progress))
    if reader != "text":
        digest.update(text_column.encode())

    def read() -> Iterable[Piece]:
        from data.tables import table_pieces
        from data.texts import text_pieces

        if reader == "text":
            return text_pieces(files)
        return table_pieces(name, reader, files, text_column)

    return Source(name, digest.hexdigest(), read, lambda: stamps_of(name, files) == stamps)


def _hub_dataset(name: str, text_column: str, cache_dir: Path, progress: Progress) -> Source:
    from data.hub import hub_pieces

    progress.doing(f"loading {name} from the Hub")
    found = hub_pieces(name, text_column, cache_dir, progress.say)
    if isinstance(found, list):
        return _files(name, found, text_column, progress)
    pieces, version = found
    digest = hashlib.sha256(f"{name}\0{version}\0{text_column}".encode())
    return Source(name, digest.hexdigest(), lambda: pieces)
