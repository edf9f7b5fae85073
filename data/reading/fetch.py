"""Copies files of servers and of the Hub to `data.cache_dir`, once."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from common.failures import Refused
from common.printable import redact_urls
from common.shared_files import remove_abandoned, temporary_name
from data.errors import DataError, TextUnreachable, cache_error
from data.progress import Progress
from data.reading.access import Access, local_file
from data.reading.content import HEAD_BYTES
from data.reading.groups import DataFile

PIECE_BYTES = 1 << 20
RANGE_BYTES = 16 << 20
"""Bytes of a Hub file that are requested at once: what a failing connection repeats at most."""
COPIES_AT_ONCE = 8
WEB_PAGE = (b"<!doctype html", b"<html")


def fetch_url(url: str, cache_dir: Path, progress: Progress) -> Path:
    """Download a URL to `cache_dir`, unless it is there. Raises DataError if that fails."""
    name = file_name_of(url)
    with closing(Access(cache_dir, progress.say)) as access, access.waiting.at_start():

        def write(path: Path) -> None:
            request = partial(_download, access, url, path, progress)
            try:
                access.waiting.until_answered(url, request)
            except TextUnreachable as error:
                raise TextUnreachable(
                    f"{error} Or download the file by other means and give its path."
                ) from error

        return _made_once(url, name, cache_dir, write)


def copy_files(
    access: Access, source: str, files: list[DataFile], progress: Progress
) -> list[DataFile]:
    """Copies of Hub files. Raises DataError if they cannot be read, and ends all of `access` then.

    They are kept by their content, so another commit copies what has changed.
    """
    progress.doing(f"fetching {source}", sum(file.size for file in files))

    def copy(file: DataFile) -> DataFile:
        def write(path: Path) -> None:
            with open(path, "xb") as opened:
                for begin in range(0, file.size, RANGE_BYTES):
                    piece = access.read(source, file, begin, begin + RANGE_BYTES)
                    opened.write(piece)
                    progress.done += len(piece)

        path = _made_once(file.version, file_name_of(file.url), access.cache_dir, write)
        return local_file(source, path, file.name)

    pool = ThreadPoolExecutor(COPIES_AT_ONCE)
    try:
        copies = [pool.submit(copy, file) for file in files]
        for copied in as_completed(copies):
            copied.result()  # raises the first error
        return [copied.result() for copied in copies]
    except BaseException:
        access.waiting.close()  # an error or Ctrl-C does not wait for the other copies
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _made_once(key: str, name: str, cache_dir: Path, write: Callable[[Path], None]) -> Path:
    """The file of a key and a name in `cache_dir`, which `write` fills unless it is there.

    Processes and machines that share the folder may do so at the same time: each uses a temporary
    name, and the first that finishes renames its file to the final name.
    """
    target = cache_dir / "fetched" / hashlib.sha256(key.encode()).hexdigest()[:16] / name
    temporary = temporary_name(target)
    try:
        remove_abandoned(target, has_lock=False)
        if target.exists() and target.stat().st_size:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(temporary)
            with open(temporary, "rb") as opened:
                os.fsync(opened.fileno())
            if not (target.exists() and target.stat().st_size):
                temporary.rename(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise cache_error(cache_dir, error) from error
    return target


def file_name_of(url: str) -> str:
    """A file name with the end of the URL's path, which decides the format; at most 100 characters.

    Raises DataError if the URL is not valid, or has a password.
    """
    try:
        parsed = urlsplit(url)
        if not parsed.hostname or (parsed.port or 0) < 0:
            raise ValueError(url)
    except ValueError as error:  # its message may hold a password
        raise DataError(
            f"data.source={redact_urls(url)} is not a valid URL: it has no host, or no valid "
            "port. It should look like https://host/path/text.txt."
        ) from error
    if parsed.username is not None:
        raise DataError(
            f"data.source={redact_urls(url)} has a user name or password before its host, which "
            "is never sent. Download the file by other means and give its path."
        )
    return re.sub(r"[^A-Za-z0-9._-]", "_", Path(parsed.path).name)[-100:].lstrip(".") or "text.txt"


def _download(access: Access, url: str, path: Path, progress: Progress) -> None:
    """Download all of a URL. Raises DataError if the disk fails, and as `Access.get`."""
    with access.get(url) as response:
        expected = response.headers.get("Content-Length")
        progress.doing(f"fetching {redact_urls(url)}", None if expected is None else int(expected))
        try:
            with open(path, "wb") as opened:
                for piece in response.iter_raw(PIECE_BYTES):
                    if progress.done == 0:
                        _refuse_page(url, response.headers.get("Content-Type", ""), piece)
                    opened.write(piece)
                    progress.done += len(piece)
        except OSError as error:  # of the disk: those of the network are of other types
            raise cache_error(access.cache_dir, error) from error
    if progress.done == 0:
        raise Refused("cannot be read: the response is empty. Check the address.")


def _refuse_page(url: str, content_type: str, begin: bytes) -> None:
    """Raise Refused if the response is a web page, and not the file itself."""
    begin = begin[:HEAD_BYTES].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    is_html = content_type.partition(";")[0].strip().lower() == "text/html"
    if ((is_html and begin.startswith(b"<")) or begin.startswith(WEB_PAGE)) and not urlsplit(
        url
    ).path.lower().endswith((".html", ".htm", ".xhtml")):
        raise Refused("is a web page (HTML), not a text. The file has another URL.")
