"""Copies files of servers, of the Hub and of stores to `data.cache_dir`, once."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from fsspec.implementations.local import LocalFileSystem

from common.failures import Refused
from common.shared_files import digest_of, make_once
from data.errors import cache_error
from data.progress import Progress
from data.reading.access import OID, Access, version_of
from data.reading.groups import DataFile

PIECE_BYTES = 1 << 20
RANGE_BYTES = 16 << 20
"""Bytes that are requested at once of a file that is listed: what a failing connection repeats at
most."""
COPIES_AT_ONCE = 8
WEB_PAGE = (b"<!doctype html", b"<html")


def copy_files(
    access: Access, source: str, files: list[DataFile], progress: Progress
) -> list[DataFile]:
    """Copies of remote files. Raises OSError, and DataError if they cannot be read; both end all
    of `access`.

    They are kept by their version, so another commit copies what has changed; one behind a URL is
    kept by the URL.
    """
    progress.doing(f"fetching {source}", sum(file.size for file in files) or None)
    with ThreadPoolExecutor(COPIES_AT_ONCE) as pool:
        try:
            return list(pool.map(partial(_copy, access, source, progress), files))
        except BaseException:
            access.close()  # an error or Ctrl-C does not wait for the other copies
            raise


def _copy(access: Access, source: str, progress: Progress, file: DataFile) -> DataFile:
    name = Path(file.name).name
    is_pinned = file.version.startswith(OID)
    key = digest_of(file.version if is_pinned else source + file.path + file.version, name)
    target = access.cache_dir / "fetched" / key[:16] / name

    def make(folder: Path) -> None:
        with open(folder / name, "wb") as opened:
            if file.version:
                for begin in range(0, file.size, RANGE_BYTES):
                    content = access.read(source, file, begin, begin + RANGE_BYTES)
                    progress.done += opened.write(content)
            else:  # a server may send no ranges
                _download(access, file.path, opened, progress)
            opened.flush()
            os.fsync(opened.fileno())

    # The user may have removed one that could not be read from its folder.
    make_once(target.parent, make, target.exists)
    disk = LocalFileSystem()
    info = disk.info(target)
    return DataFile(str(target), file.name, info["size"], version_of(info), disk)


def _download(access: Access, url: str, opened: IO[bytes], progress: Progress) -> None:
    """Download all of a URL. Raises DataError."""

    def attempt() -> None:
        opened.seek(0)
        opened.truncate()
        with access.get(url) as response:
            expected = response.headers.get("Content-Length")
            progress.done, progress.total = 0, None if expected is None else int(expected)
            for piece in response.iter_raw(PIECE_BYTES):
                begin = piece.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
                is_page = progress.done == 0 and begin.startswith(WEB_PAGE)
                if is_page and not urlsplit(url).path.lower().endswith((".html", ".htm")):
                    raise Refused("is a web page (HTML), not a text. The file has another URL.")
                try:
                    progress.done += opened.write(piece)
                except OSError as error:  # of the disk: those of the network are of other types
                    raise cache_error(access.cache_dir, error) from error
        if progress.done == 0:
            raise Refused("cannot be read: the response is empty. Check the address.")

    access.until_answered(url, attempt)
