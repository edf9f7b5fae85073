"""Download of a text from a URL. (`datasets` would need aiohttp for this alone.)"""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import re
import socket
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from data.errors import DataError, TextUnreachable, cache_error
from data.once import remove_abandoned, temporary_name
from data.progress import Progress
from data.reading.formats import HEAD_BYTES
from data.urls import is_transient, redact_urls

TIMEOUT_SECONDS = 60
PIECE_BYTES = 1 << 20
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
WEB_PAGE = (b"<!doctype html", b"<html")


def fetch_url(url: str, cache_dir: Path, progress: Progress) -> Path:
    """Download a URL to `cache_dir`, unless it is there. Raises DataError if that fails.

    Processes and machines that share the folder may download at the same time: each uses a
    temporary name, and the first that finishes renames its file to the final name.
    """
    target = (
        cache_dir / "fetched" / hashlib.sha256(url.encode()).hexdigest()[:16] / file_name_of(url)
    )
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
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise cache_error(cache_dir, error) from error
        kind = TextUnreachable if _is_transient(error) else DataError
        reason = str(error).removeprefix("<urlopen error ").removesuffix(">")
        raise kind(
            f"data.source={redact_urls(url)} could not be fetched: {reason}. Check the URL "
            "and the network, or download the file by other means and give its path."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _is_transient(error: Exception) -> bool:
    """Whether the network or the server failed, and the URL may be right."""
    if isinstance(error, urllib.error.HTTPError):
        return is_transient(error.code)
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, socket.gaierror):
        return reason.errno != socket.EAI_NONAME
    return isinstance(reason, (ConnectionError, TimeoutError, http.client.IncompleteRead)) or (
        isinstance(reason, OSError) and reason.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH)
    )


def file_name_of(url: str) -> str:
    """A file name with the end of the URL's path, which decides the format; at most 100 characters.

    Raises DataError if the URL is not valid, or has a password.
    """
    try:
        parsed = urllib.parse.urlparse(url)
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
    request = urllib.request.Request(_in_ascii(url), headers={"Accept-Encoding": "identity"})
    received, digest = 0, hashlib.sha256()
    with (
        urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response,
        open(path, "xb") as opened,
    ):
        expected = response.headers.get("Content-Length")
        progress.doing(
            f"fetching {redact_urls(url)}", int(expected) if expected is not None else None
        )
        while piece := response.read(PIECE_BYTES):
            if received == 0:
                _refuse_page(url, response.headers, piece)
            opened.write(piece)
            digest.update(piece)
            received += len(piece)
            progress.done = received
        opened.flush()
        os.fsync(opened.fileno())
    if expected is not None and received != int(expected):
        raise OSError(f"{received} of {expected} bytes arrived")
    if received == 0:
        raise OSError("the response is empty")
    with open(path, "rb") as opened:
        if hashlib.file_digest(opened, "sha256").digest() != digest.digest():
            raise OSError(f"{path} does not hold what arrived")


def _in_ascii(url: str) -> str:
    """The URL with non-ASCII characters encoded, as HTTP requires."""
    parsed = urllib.parse.urlparse(url)
    host = parsed.netloc if parsed.netloc.isascii() else parsed.netloc.encode("idna").decode()
    return urllib.parse.quote(parsed._replace(netloc=host).geturl(), safe="!#$%&'()*+,/:;=?@[]~")


def _refuse_page(url: str, headers: http.client.HTTPMessage, begin: bytes) -> None:
    """Raise OSError for a response that is not the file: a web page, or a compressed body."""
    path = urllib.parse.urlparse(url).path.lower()
    encoding = headers.get("Content-Encoding", "identity").lower()
    packed = path.endswith(".gz") and encoding in ("gzip", "x-gzip")  # the file's own compression
    if encoding != "identity" and not packed:
        raise OSError(f"the response is compressed ({encoding}), although the request forbids it")
    begin = begin[:HEAD_BYTES].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    page = headers.get_content_type() == "text/html" and begin.startswith(b"<")
    if (page or begin.startswith(WEB_PAGE)) and not path.endswith((".html", ".htm", ".xhtml")):
        raise OSError("the response is a web page (HTML), not a text: the file has another URL")
