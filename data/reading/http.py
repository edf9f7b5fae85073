"""Reads byte ranges over HTTP, from any server and from the Hub."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import httpx2

from data.printable import redact_urls
from data.reading.groups import DataFile
from data.reading.waiting import Unanswered, is_transient, seconds_of

HTTP = re.compile(r"https?://", re.IGNORECASE)
TIMEOUT_SECONDS = 20.0
"""How long a request waits for the next bytes."""
CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")
TRIES_WITHOUT_RANGE = 3
"""A server that has sent this many whole files and no range does not support ranges."""
OID = "oid:"
"""Prefix of the versions of Hub files. They belong to a commit, so they cannot change."""
NO_RANGES = (
    "cannot be streamed: the server sends no byte ranges. Set data.streaming=false, which "
    "downloads it, or give the path of a copy."
)
LOG_IN = "For a private data set of the Hub log in with `hf auth login`, or set HF_TOKEN."


class Changed(Exception):
    """The file is not the one that was listed."""


class Refused(Exception):
    """A final error. The message completes a sentence that begins with the URL."""


class HttpFiles:
    """A pool of connections."""

    def __init__(self) -> None:
        self._client: httpx2.Client | None = None
        self._with_ranges: set[str] = set()
        """Servers that have sent a range."""
        self._without_range: Counter[str] = Counter()
        """By server, how many range requests it has answered with whole files."""
        self._lock = threading.Lock()

    def _opened(self) -> httpx2.Client:
        with self._lock:
            if self._client is None:
                limits = httpx2.Limits(max_connections=64, max_keepalive_connections=64)
                self._client = httpx2.Client(
                    timeout=TIMEOUT_SECONDS, follow_redirects=True, limits=limits
                )
            return self._client

    def close(self) -> None:
        """End the connections."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def get_from_hub(self, url: str) -> tuple[Any, str | None]:
        """Request JSON from the Hub; returns it and the URL of the next page, if any."""
        response = self._request(url, {}, lambda response: response.read(), of_hub=True)
        try:
            return response.json(), response.links.get("next", {}).get("url")
        except ValueError as error:  # a proxy's page
            raise Unanswered("the answer is not JSON") from error

    def stat(self, url: str) -> tuple[int, str]:
        """Size and version of a file. Raises Unanswered or Refused."""
        response = self._request(url, {"Range": "bytes=0-0"}, lambda response: None)
        content_range = response.headers.get("Content-Range", "")
        if content_range == "bytes */0":
            return 0, version_of(response.headers, 0)
        found = CONTENT_RANGE.fullmatch(content_range)
        if response.status_code != HTTPStatus.PARTIAL_CONTENT or found is None:
            raise self._no_range(url)
        self._with_ranges.add(_server(url))
        size = int(found[2])
        return size, version_of(response.headers, size)

    def read(self, file: DataFile, begin: int, end: int, into: bytearray) -> None:
        """Append the bytes from `begin + len(into)` to `end`. Whatever arrives is kept.

        Raises Unanswered if less arrives, Changed if the file is not the listed one, and Refused.
        """

        def receive(response: httpx2.Response) -> None:
            if response.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise Changed
            found = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if found is None or int(found[1]) != first:
                raise self._no_range(file.url)
            self._with_ranges.add(_server(file.url))
            if not is_same(file, response.headers, int(found[2])):
                raise Changed
            for piece in response.iter_raw():
                into.extend(piece[: end - begin - len(into)])

        first = begin + len(into)
        asked = {"Range": f"bytes={first}-{end - 1}"}
        self._request(file.url, asked, receive, of_hub=file.version.startswith(OID))
        if len(into) < end - begin:
            raise Unanswered("the connection ended too early")

    def _no_range(self, url: str) -> Unanswered | Refused:
        """The error for an answer without the range. A cache may send a whole file once."""
        server = _server(url)
        self._without_range[server] += 1
        tries = self._without_range[server]
        if server not in self._with_ranges and tries >= TRIES_WITHOUT_RANGE:
            return Refused(NO_RANGES)
        return Unanswered("the answer is not the range of bytes that was requested")

    def _request(
        self,
        url: str,
        headers: dict[str, str],
        receive: Callable[[httpx2.Response], object],
        of_hub: bool = False,
    ) -> httpx2.Response:
        token = token_headers(url) if of_hub else {}
        asked = {"Accept-Encoding": "identity", **headers, **token}
        try:
            with self._opened().stream("GET", url, headers=asked) as response:
                unauthorized = response.status_code == HTTPStatus.UNAUTHORIZED
                if unauthorized and of_hub and token_headers(url) != token:
                    raise Unanswered("the token was replaced")
                _check(response)
                receive(response)
                return response
        except httpx2.TimeoutException as error:
            raise Unanswered(f"no answer in {TIMEOUT_SECONDS:.0f} s") from error
        except (httpx2.TransportError, httpx2.StreamError) as error:
            reason = redact_urls(str(error)) or type(error).__name__
            raise Unanswered(reason.rstrip(".")) from error
        except (httpx2.InvalidURL, httpx2.TooManyRedirects, httpx2.DecodingError) as error:
            raise Refused(f"cannot be read: {error}. Check the address.") from error


def _server(url: str) -> str:
    return urlsplit(url).netloc


def token_headers(url: str) -> dict[str, str]:
    """The user's token for the Hub. It is read for each request, because tokens expire.

    Raises Refused if the Hub is not to be reached.
    """
    import datasets
    from datasets.utils.file_utils import get_authentication_headers_for_url

    if datasets.config.HF_HUB_OFFLINE:
        raise Refused("is on the Hub, and HF_HUB_OFFLINE is set. Unset it.")
    return dict(get_authentication_headers_for_url(url))


def check_transient(status: int, headers: Mapping[str, str]) -> None:
    """Raise Unanswered for a status that may pass."""
    if is_transient(status):
        # The Hub names the end of its rate limit in a header of its own: `"api";r=0;t=55`.
        limit = re.search(r"\bt=(\d+)", headers.get("RateLimit", ""))
        retry_after = seconds_of(headers.get("Retry-After"))
        if retry_after is None and limit is not None:
            retry_after = float(limit[1])
        raise Unanswered(f"HTTP {status}", retry_after)


def _check(response: httpx2.Response) -> None:
    """Raise Unanswered or Refused for an error status."""
    status = response.status_code
    if response.is_success or status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        return
    check_transient(status, response.headers)
    if status in (401, 403):
        raise Refused(
            f"is refused (HTTP {status}). {LOG_IN} The signature of a URL may have expired."
        )
    if status in (404, 410):
        raise Refused(
            f"does not exist (HTTP {status}): it was renamed or deleted, or is private. Check its "
            f"name. {LOG_IN}"
        )
    raise Refused(f"cannot be read: HTTP {status}. Check the address.")


def version_of(headers: httpx2.Headers, size: int) -> str:
    """The etag, or else the size and the modification time."""
    return headers.get("ETag") or f"{size}-{headers.get('Last-Modified', '')}"


def is_same(file: DataFile, headers: httpx2.Headers, size: int) -> bool:
    """Whether a response is from the version of the file that was listed."""
    return size == file.size and (
        file.version.startswith(OID) or version_of(headers, size) == file.version
    )
