"""Copies files of servers, of the Hub and of stores to `data.cache_dir`, once."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from common.failures import Refused
from common.printable import redact_urls
from common.shared_files import digest_of, make_once
from data.errors import TextUnreachable, cache_error
from data.progress import Progress
from data.reading.access import HTTP, OID, Access
from data.reading.files import file_name_of, local_file
from data.reading.formats import HEAD_BYTES
from data.reading.groups import DataFile

PIECE_BYTES = 1 << 20
RANGE_BYTES = 16 << 20
"""Bytes that are requested at once of a file that is listed: what a failing connection repeats at
most."""
COPIES_AT_ONCE = 8
WEB_PAGE = (b"<!doctype html", b"<html")


def unlisted_url(url: str) -> DataFile:
    """The file behind a URL, of which nothing is known: its server may send no ranges."""
    return DataFile(url, file_name_of(url), 0, "")


def copy_files(
    access: Access, source: str, files: list[DataFile], progress: Progress
) -> list[DataFile]:
    """Copies of remote files. Raises DataError if they cannot be read, and ends all of `access`.

    They are kept by their content, so another commit copies what has changed; one behind a URL is
    kept by the URL.
    """
    progress.doing(f"fetching {source}", sum(file.size for file in files) or None)
    pool = ThreadPoolExecutor(COPIES_AT_ONCE)
    try:
        copies = [pool.submit(_copy, access, source, file, progress) for file in files]
        for copied in as_completed(copies):
            copied.result()  # raises the first error
        return [copied.result() for copied in copies]
    except BaseException:
        access.close()  # an error or Ctrl-C does not wait for the other copies
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _copy(access: Access, source: str, file: DataFile, progress: Progress) -> DataFile:
    is_pinned, is_http = file.version.startswith(OID), HTTP.match(file.url)
    name = file_name_of(file.url) if is_http else Path(file.name).name
    key = digest_of(file.version if is_pinned else file.url + file.version, name)
    target = access.cache_dir / "fetched" / key[:16] / name

    def make(folder: Path) -> None:
        with open(folder / name, "wb") as opened:
            if file.version:
                for begin in range(0, file.size, RANGE_BYTES):
                    progress.done += opened.write(
                        access.read(source, file, begin, begin + RANGE_BYTES)
                    )
            else:
                _download(access, file.url, opened, progress)
            opened.flush()
            os.fsync(opened.fileno())

    try:
        # One that could not be read was removed from its folder.
        make_once(target.parent, make, lambda: target.exists() and target.stat().st_size > 0)
    except OSError as error:
        raise cache_error(access.cache_dir, error) from error
    return local_file(source, target, file.name)


def _download(access: Access, url: str, opened: IO[bytes], progress: Progress) -> None:
    """Download all of a URL. Raises DataError."""

    def attempt() -> None:
        opened.seek(0)
        opened.truncate()
        with access.get(url) as response:
            expected = response.headers.get("Content-Length")
            size = None if expected is None else int(expected)
            progress.doing(f"fetching {redact_urls(url)}", size)
            for piece in response.iter_raw(PIECE_BYTES):
                if progress.done == 0:
                    _refuse_page(url, response.headers.get("Content-Type", ""), piece)
                try:
                    progress.done += opened.write(piece)
                except OSError as error:  # of the disk: those of the network are of other types
                    raise cache_error(access.cache_dir, error) from error
        if progress.done == 0:
            raise Refused("cannot be read: the response is empty. Check the address.")

    try:
        access.until_answered(url, attempt)
    except TextUnreachable as error:
        raise TextUnreachable(
            f"{error} Or download the file by other means and give its path."
        ) from error


def _refuse_page(url: str, content_type: str, begin: bytes) -> None:
    """Raise Refused if the response is a web page, and not the file itself."""
    begin = begin[:HEAD_BYTES].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    is_html = content_type.partition(";")[0].strip().lower() == "text/html"
    is_page = begin.startswith(WEB_PAGE) or (is_html and begin.startswith(b"<"))
    if is_page and not urlsplit(url).path.lower().endswith((".html", ".htm", ".xhtml")):
        raise Refused("is a web page (HTML), not a text. The file has another URL.")
