"""Where text comes from: `data.source` to a stream of pieces of text.

A source is an `IterableDataset` with the columns `text` (a piece of the corpus, in order) and
`ends` (the offsets in the piece, in characters, at which a document ends). Pieces are a few MB at
most where the format allows, so that a corpus of any size passes through in bounded memory.

Every document ends with a newline: one is added where it is missing. Only a corpus that is one
single text file is taken to the letter.
"""

from __future__ import annotations

import bz2
import codecs
import glob
import gzip
import hashlib
import lzma
import re
import sysconfig
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import datasets
from datasets import Features, IterableDataset, List, Value

from data.errors import DataError

PIECE_BYTES = 1 << 20
ROWS_PER_PIECE = 64
PIECE_FEATURES = Features({"text": Value("large_string"), "ends": List(Value("int64"))})
TEXT_SUFFIXES = (".txt", ".text", ".md", ".py")
TABLE_READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
COMPRESSIONS: dict[str, Any] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
URL_TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class Source:
    """A corpus that can be read any number of times."""

    name: str
    """As a person calls it."""
    key: str
    """Changes whenever the text may have changed; what preparation is cached by."""
    pieces: IterableDataset
    """Columns `text` and `ends`, see the module."""


def open_source(source: str, text_column: str, cache_dir: Path) -> Source:
    """The corpus that `data.source` names.

    `python-docs` and `python-stdlib` come with Python. A URL is fetched once into `cache_dir`. What
    looks like a file (it exists, or is a pattern, or ends like a text) is read from this disk, and
    anything else of the form `name` or `owner/name` is a data set on the Hub, of which the split
    `train` is read.

    Raises DataError when there is no such text.
    """
    if source == "python-docs":
        return _embedded(source, _python_docs())
    if source == "python-stdlib":
        return _files(source, _python_stdlib(), text_column)
    if re.match(r"https?://", source):
        return _files(source, [_fetched(source, cache_dir)], text_column)
    if _looks_like_files(source):
        return _files(source, _matching_files(source), text_column)
    return _hub_dataset(source, text_column)


# What Python carries


def _python_docs() -> list[str]:
    """The language reference as `help()` shows it: about 465,000 characters in 79 topics."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _python_stdlib() -> list[Path]:
    """The standard library's modules, without tests and without what was installed beside them."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if not left_out.intersection(path.relative_to(root).parts)
    ]


def _embedded(name: str, documents: list[str]) -> Source:
    digest = hashlib.sha256("\0".join(documents).encode())
    pieces = IterableDataset.from_generator(
        _document_pieces, features=PIECE_FEATURES, gen_kwargs={"documents": documents}
    )
    return Source(name, digest.hexdigest(), pieces)


def _document_pieces(documents: list[str]) -> Iterator[dict]:
    for document in documents:
        text = document if document.endswith("\n") else document + "\n"
        yield {"text": text, "ends": [len(text)]}


# Files


def _suffixes(path: str) -> tuple[str, str]:
    """The ending that tells the format and the one that tells the compression ('' for none)."""
    bare = Path(path)
    compression = bare.suffix if bare.suffix in COMPRESSIONS else ""
    return (Path(bare.stem) if compression else bare).suffix, compression


def _looks_like_files(source: str) -> bool:
    return (
        Path(source).expanduser().exists()
        or any(mark in source for mark in "*?[")
        or source.startswith(("/", "./", "../", "~"))
        or _suffixes(source)[1] != ""
        or _suffixes(source)[0] in (*TEXT_SUFFIXES, *TABLE_READERS)
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
    readers = {TABLE_READERS.get(_suffixes(str(file))[0], "text") for file in files}
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
    if reader == "text":
        pieces = IterableDataset.from_generator(
            _text_pieces,
            features=PIECE_FEATURES,
            gen_kwargs={"files": [str(file) for file in files]},
        )
        return Source(name, digest.hexdigest(), pieces)
    digest.update(text_column.encode())
    try:
        rows = datasets.load_dataset(
            reader, data_files=[str(file) for file in files], split="train", streaming=True
        )
        return Source(name, digest.hexdigest(), _row_pieces(name, rows, text_column))
    except DataError:
        raise
    except Exception as error:  # readers raise their own types: pyarrow's, pandas', OSError, ...
        raise DataError(f"data.source={name} cannot be read as {reader}: {error}") from error


def _text_pieces(files: list[str]) -> Iterator[dict]:
    """Whole files as documents, read as UTF-8 in pieces; a byte order mark is not text."""
    single = len(files) == 1
    for file in files:
        last = ""
        for text in _decoded(file):
            if last:
                yield {"text": last, "ends": []}
            last = text
        if not single and not last.endswith("\n"):
            last += "\n"
        yield {"text": last, "ends": [len(last)]}


def _decoded(file: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0  # bytes given to the decoder before this piece
    try:
        with _open_bytes(file) as opened:
            while piece := opened.read(PIECE_BYTES):
                held = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(piece)
                except UnicodeDecodeError as error:
                    raise _not_utf8(file, read - held + error.start) from error
                yield text.removeprefix("\ufeff") if read == 0 else text
                read += len(piece)
            held = len(decoder.getstate()[0])
            if held:
                raise _not_utf8(file, read - held)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"data.source: {file} cannot be read to its end: {error}.") from error


def _open_bytes(file: str) -> IO[bytes]:
    opener = COMPRESSIONS.get(_suffixes(file)[1])
    return opener(file, "rb") if opener else open(file, "rb")


def _not_utf8(file: str, offset: int) -> DataError:
    return DataError(
        f"data.source: {file} is not UTF-8: byte {offset} (counted from 0) begins no character. "
        f"Convert it first, for example: iconv -f LATIN1 -t UTF-8 {file} > utf8.txt"
    )


def _fetched(url: str, cache_dir: Path) -> Path:
    """The file behind a URL, fetched once. `datasets` would need aiohttp for this alone."""
    name = Path(urllib.parse.urlparse(url).path).name or "text.txt"
    target = cache_dir / "fetched" / hashlib.sha256(url.encode()).hexdigest()[:16] / name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(target.suffix + ".part")
    try:
        with (
            urllib.request.urlopen(url, timeout=URL_TIMEOUT_SECONDS) as answer,
            open(partial, "wb") as opened,
        ):
            received = 0
            while piece := answer.read(PIECE_BYTES):
                opened.write(piece)
                received += len(piece)
            expected = answer.headers.get("Content-Length")
        if expected is not None and received != int(expected):
            raise OSError(f"{received} of {expected} bytes arrived")
    except (OSError, urllib.error.URLError) as error:
        partial.unlink(missing_ok=True)
        raise DataError(
            f"data.source={url} could not be fetched: {error}. Check the address and the network, "
            "or fetch the file by other means and give its path."
        ) from error
    return partial.rename(target)


# Tables and the Hub


def _hub_dataset(name: str, text_column: str) -> Source:
    """The split `train` of a data set on the Hub, downloaded once into the datasets cache."""
    try:
        builder = datasets.load_dataset_builder(name)
        builder.download_and_prepare()
        rows = builder.as_dataset(split="train")
    except Exception as error:  # of many unrelated types: the Hub's, the network's, the builder's
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"data.source={name} is neither a file here nor a data set whose split 'train' could "
            f"be loaded from the Hub: {reason}"
        ) from error
    digest = hashlib.sha256(f"{name}\0{builder.cache_dir}\0{text_column}".encode())
    return Source(
        name, digest.hexdigest(), _row_pieces(name, rows.to_iterable_dataset(), text_column)
    )


def _row_pieces(name: str, rows: IterableDataset, text_column: str) -> IterableDataset:
    """Each row is a document; rows are joined into pieces."""
    first = next(iter(rows), None)
    if first is None:
        raise DataError(f"data.source={name} has no rows.")
    if text_column not in first:
        raise DataError(
            f"data.text_column={text_column} is not a column of {name}. "
            f"Its columns: {', '.join(first)}."
        )
    if not isinstance(first[text_column], str | None):
        raise DataError(
            f"data.text_column={text_column} of {name} holds "
            f"{type(first[text_column]).__name__}, not text. Its columns: {', '.join(first)}."
        )
    return rows.select_columns([text_column]).map(
        _join_rows,
        batched=True,
        batch_size=ROWS_PER_PIECE,
        remove_columns=[text_column],
        fn_kwargs={"column": text_column},
        features=PIECE_FEATURES,
    )


def _join_rows(batch: dict[str, list], column: str) -> dict[str, list]:
    parts: list[str] = []
    ends: list[int] = []
    length = 0
    for row in batch[column]:
        if not row:  # null or empty: no document
            continue
        text = row if row.endswith("\n") else row + "\n"
        length += len(text)
        parts.append(text)
        ends.append(length)
    return {"text": ["".join(parts)], "ends": [ends]}
