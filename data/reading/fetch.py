"""Downloads a text from a URL."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

import httpx2

from data.errors import DataError, TextUnreachable, cache_error
from data.printable import redact_urls
from data.progress import Progress
from data.reading.content import HEAD_BYTES
from data.reading.waiting import Unanswered, is_transient
from data.shared_files import remove_abandoned, temporary_name

TIMEOUT_SECONDS = 60.0
PIECE_BYTES = 1 << 20
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
WEB_PAGE = (b"<!doctype html", b"<html")


def fetch_url(url: str, cache_dir: Path, progress: Progress) -> Path:
    """Download a URL to `cache_dir`, unless it is there. Raises DataError if that fails.

    Processes and machines that share the folder may download at the same time: each uses a
    temporary name, and the first that finishes renames its file to the final name.
    """
    folder = cache_dir / "fetched" / hashlib.sha256(url.encode()).hexdigest()[:16]
    target = folder / file_name_of(url)
    try:
        remove_abandoned(target, has_lock=False)
        if target.exists() and target.stat().st_size:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cache_error(cache_dir, error) from error
    temporary = temporary_name(target)
    try:
        progress.doing(f"fetching {redact_urls(url)}")
        _download(url, temporary, progress)
        if not (target.exists() and target.stat().st_size):
            temporary.rename(target)
    except (OSError, ValueError, httpx2.HTTPError, httpx2.InvalidURL, Unanswered) as error:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise cache_error(cache_dir, error) from error
        passes = isinstance(error, (httpx2.TransportError, Unanswered))
        kind = TextUnreachable if passes and not _is_unknown_host(error) else DataError
        reason = redact_urls(str(error)) or type(error).__name__
        raise kind(
            f"data.source={redact_urls(url)} could not be fetched: {reason.rstrip('.')}. Check the "
            "URL and the network, or download the file by other means and give its path."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
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


def _download(url: str, path: Path, progress: Progress) -> None:
    """Download into a new file. Raises OSError, ValueError, Unanswered or an error of httpx2."""
    received, digest = 0, hashlib.sha256()
    with (
        httpx2.stream(
            "GET",
            url,
            headers={"Accept-Encoding": "identity"},
            timeout=TIMEOUT_SECONDS,
            follow_redirects=True,
        ) as response,
        open(path, "xb") as opened,
    ):
        if not response.is_success:
            reason = f"HTTP {response.status_code} {response.reason_phrase}"
            raise (Unanswered if is_transient(response.status_code) else ValueError)(reason)
        expected = response.headers.get("Content-Length")
        progress.doing(f"fetching {redact_urls(url)}", None if expected is None else int(expected))
        try:
            for piece in response.iter_raw(PIECE_BYTES):
                if received == 0:
                    _refuse_page(url, response.headers, piece)
                opened.write(piece)
                digest.update(piece)
                received += len(piece)
                progress.done = received
        except httpx2.RemoteProtocolError as error:
            if expected is None:
                raise
            arrived = response.num_bytes_downloaded
            raise Unanswered(f"{arrived} of {expected} bytes arrived") from error
        opened.flush()
        os.fsync(opened.fileno())
    if received == 0:
        raise OSError("the response is empty")
    with open(path, "rb") as opened:
        if hashlib.file_digest(opened, "sha256").digest() != digest.digest():
            raise OSError(f"{path} does not hold what arrived")


def _is_unknown_host(error: BaseException | None) -> bool:
    """Whether the host name is unknown, most likely because the URL is wrong."""
    while error is not None:
        if isinstance(error, socket.gaierror):
            return error.errno == socket.EAI_NONAME
        error = error.__cause__ or error.__context__
    return False


def _refuse_page(url: str, headers: httpx2.Headers, begin: bytes) -> None:
    """Raise OSError if the response is a web page or compressed, and not the file itself."""
    path = urlsplit(url).path.lower()
    encoding = headers.get("Content-Encoding", "identity").lower()
    packed = path.endswith(".gz") and encoding in ("gzip", "x-gzip")  # the file's own compression
    if encoding != "identity" and not packed:
        raise OSError(f"the response is compressed ({encoding}), although the request forbids it")
    begin = begin[:HEAD_BYTES].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    is_html = headers.get("Content-Type", "").partition(";")[0].strip().lower() == "text/html"
    if ((is_html and begin.startswith(b"<")) or begin.startswith(WEB_PAGE)) and not path.endswith(
        (".html", ".htm", ".xhtml")
    ):
        raise OSError("the response is a web page (HTML), not a text: the file has another URL")
