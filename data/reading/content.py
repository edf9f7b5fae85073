"""Decompresses files, and recognises other formats by their first bytes."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import shlex
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from data.errors import BrokenText


def _open_zstd(file: Any) -> Any:
    import pyarrow as pa  # a second of a start that reads no such file

    return pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")


class _Streams(io.RawIOBase):
    """Streams of bzip2 or xz in a file, one after another, with NUL bytes between them or not.

    What else follows a stream is damaged and raises an error: `bz2.open` and `lzma.open` take it
    for the end of the file, so that the rest of a text would be missing without a word.
    """

    def __init__(self, file: Any, decoder: Callable[[], Any]) -> None:
        self._file, self._decoder_of, self._decoder = file, decoder, decoder()
        self._next = b""
        """What has been read of the next stream."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._decoder.eof or self._begins_another():
            block = b""
            if self._decoder.needs_input:
                block, self._next = self._next or self._file.read(BLOCK_BYTES), b""
                if not block:
                    raise EOFError("it ends in the middle of a compressed stream")
            if found := self._decoder.decompress(block, len(buffer)):
                buffer[: len(found)] = found
                return len(found)
        return 0

    def _begins_another(self) -> bool:
        """Whether another stream follows, which is read from now on."""
        rest = self._decoder.unused_data or self._file.read(BLOCK_BYTES)
        while rest and not (begin := rest.lstrip(b"\0")):
            rest = self._file.read(BLOCK_BYTES)
        if rest:
            self._decoder, self._next = self._decoder_of(), begin
        return bool(rest)


def _open_streams(decoder: Callable[[], Any], file: Any) -> Any:
    return io.BufferedReader(_Streams(file, decoder))


class Compression(NamedTuple):
    """How a compressed file is read."""

    open: Callable[[Any], Any]
    """Wraps an open binary file."""
    magic: bytes
    """Pattern of the first bytes of such a file."""
    unpack: str
    """Command that prints the content of the file named after it."""


COMPRESSIONS = {
    ".gz": Compression(gzip.open, rb"\x1f\x8b", "gzip -dc <"),
    ".bz2": Compression(partial(_open_streams, bz2.BZ2Decompressor), rb"BZh", "bzip2 -dc <"),
    ".xz": Compression(
        partial(_open_streams, lzma.LZMADecompressor), rb"\xfd7zXZ|\x5d\x00\x00", "xz -dc <"
    ),
    ".zst": Compression(_open_zstd, rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", "zstd -dc"),
}
"""Keys are file extensions."""
PACKED_NAMES = (*COMPRESSIONS, ".bz", ".zstd")
"""Extensions that are dropped when a file is unpacked."""
BROKEN_COMPRESSION = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""Raised by reading a broken compressed file."""
HEAD_BYTES = 512
BLOCK_BYTES = 1 << 16
UNPACK = "Unpack it first: "
OTHER_FORMATS = (
    (b"PK\x03\x04", "a ZIP archive", UNPACK + "unzip {file}"),
    (b"\x28\xb5\x2f\xfd", "compressed by Zstandard", UNPACK + "zstd -dc {file} > {bare}"),
    (b"\x1f\x8b", "compressed by gzip", UNPACK + "gzip -dc < {file} > {bare}"),
    (b"BZh91AY&SY", "compressed by bzip2", UNPACK + "bzip2 -dc < {file} > {bare}"),
    (b"\xfd7zXZ\x00", "compressed by xz", UNPACK + "xz -dc < {file} > {bare}"),
    (b"%PDF-", "a PDF document", "Convert it first: pdftotext {file} text.txt"),
    (b"PAR1", "a Parquet table", "Rename it to a name that ends in .parquet."),
    (b"ARROW1", "an Arrow table", "Convert it to Parquet first."),
    (b"version https://git-lfs", "a Git LFS pointer", "Fetch the file itself: git lfs pull"),
)
"""The first bytes, the format that they indicate, and how to convert it."""
BYTE_ORDER_MARKS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)


LATIN = "if it is Windows-1252 or Latin-1"
"""Windows-1252 differs from Latin-1 only where Latin-1 has control characters."""


def suffixes(path: str) -> tuple[str, str]:
    """The file extensions of format and compression, '' for none.

    In lower case: `A.TXT.GZ` has the format of `a.txt.gz`.
    """
    bare = Path(path.lower())
    compression = bare.suffix if bare.suffix in COMPRESSIONS else ""
    return (Path(bare.stem) if compression else bare).suffix, compression


def decompressed(name: str, file: Any) -> IO[bytes]:
    """An open file of bytes, decompressed according to its name."""
    compression = suffixes(name)[1]
    return COMPRESSIONS[compression].open(file) if compression else file


def refuse_uncompressed(source: str, file: str, head: bytes) -> None:
    """Raise BrokenText if a file that begins with `head` is not compressed as its name says."""
    compression = suffixes(file)[1]
    if compression and head and not re.match(COMPRESSIONS[compression].magic, head):
        refuse_content(file, head)
        raise BrokenText(
            f"data.source={source}: {file} cannot be read: it is not compressed as its name says. "
            f"Copy it again, or give it a name without {compression}."
        )


def refuse_content(file: str, head: bytes) -> None:
    """Raise BrokenText if the first bytes of a file's content indicate another format.

    The message has the command that converts it, where there is one.
    """
    for magic, what, remedy in OTHER_FORMATS:
        if head.startswith(magic):
            remedy = remedy.format(file=shlex.quote(file), bare=shlex.quote(_unpacked(file)))
            raise BrokenText(f"data.source: {file} is {what}, not a text. {remedy}")
    for mark, encoding in BYTE_ORDER_MARKS:
        if head.startswith(mark):
            raise BrokenText(
                f"data.source: {file} is not UTF-8: byte 0 (counted from 0) begins a text in "
                f"{encoding}. Convert it first, for example: {iconv(encoding, file)}"
            )
    # NUL is a character of UTF-8, but no text has many: a tar archive, UTF-16, a torn copy do.
    if head.count(0) * 4 > len(head):
        raise BrokenText(
            f"data.source: {file} is not a text: its first bytes are NUL for the most part. Unpack "
            "it if it is an archive, convert it to UTF-8 if it is a text, or copy it again."
        )


def _unpacked(file: str) -> str:
    """A file name for the unpacked content, in the current folder and with the same format."""
    path = PurePosixPath(file)
    if path.suffix.lower() not in PACKED_NAMES:
        return f"{path.stem}-unpacked{path.suffix or '.txt'}"
    return path.stem if PurePosixPath(path.stem).suffix else f"{path.stem}-unpacked.txt"


def iconv(encoding: str, file: str) -> str:
    """The command that converts a file to UTF-8 and keeps its format."""
    suffix, compression = suffixes(file)
    into = f"utf8{suffix or '.txt'}"
    convert = f"iconv -f {encoding} -t UTF-8"
    if not compression:
        return f"{convert} {shlex.quote(file)} > {into}"
    return f"{COMPRESSIONS[compression].unpack} {shlex.quote(file)} | {convert} > {into}"
