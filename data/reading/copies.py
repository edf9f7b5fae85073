"""Copies files of servers, of the Hub and of stores to `data.cache_dir`, once."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from common.failures import Refused
from common.shared_files import digest_of, make_once
from data.errors import cache_error
from data.progress import Progress
from data.reading.access import OID, Access
from data.reading.files import listed_files
from data.reading.groups import HTTP, DataFile

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

    They are kept by their content, so another commit copies what has changed; one behind a URL is
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
    is_pinned, name = file.version.startswith(OID), Path(file.name).name
    key = digest_of(file.version if is_pinned else file.url + file.version, name)
    target = access.cache_dir / "fetched" / key[:16] / name

    def make(folder: Path) -> None:
        with open(folder / name, "wb") as opened:
            if HTTP.match(file.url) and not is_pinned:
                _download(access, file.url, opened, progress)
            else:
                for begin in range(0, file.size, RANGE_BYTES):
                    content = access.read(source, file, begin, begin + RANGE_BYTES)
                    progress.done += opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())

    # The user may have removed one that could not be read from its folder.
    make_once(target.parent, make, target.exists)
    (copied,) = listed_files(access, str(target))
    return DataFile(copied.url, file.name, copied.size, copied.version)


def _download(access: Access, url: str, opened: IO[bytes], progress: Progress) -> None:
    """Download all of a URL, whose server may send no ranges. Raises DataError."""

    def attempt() -> None:
        opened.seek(0)
        opened.truncate()
        with access.get(url) as response:
            expected = response.headers.get("Content-Length")
            progress.done, progress.total = 0, None if expected is None else int(expected)
            for piece in response.iter_raw(PIECE_BYTES):
                if progress.done == 0:
                    _refuse_page(url, piece)
                try:
                    progress.done += opened.write(piece)
                except OSError as error:  # of the disk: those of the network are of other types
                    raise cache_error(access.cache_dir, error) from error
        if progress.done == 0:
            raise Refused("cannot be read: the response is empty. Check the address.")

    access.until_answered(url, attempt)


def _refuse_page(url: str, begin: bytes) -> None:
    """Raise Refused if the response is a web page, and not the file itself."""
    is_page = begin.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(WEB_PAGE)
    if is_page and not urlsplit(url).path.lower().endswith((".html", ".htm", ".xhtml")):
        raise Refused("is a web page (HTML), not a text. The file has another URL.")
