"""Reads the bytes of data files, wherever they are: a disk, a server, the Hub or a store of fsspec.

Every request goes through `Access.until_answered`, which repeats it while a network or a server
fails: half a minute while a run starts, hours once it trains.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import httpx2
from fsspec.spec import AbstractFileSystem
from huggingface_hub import constants
from huggingface_hub.utils import build_hf_headers

from common.failures import Failure, Refused, Unanswered, failure_of
from common.printable import redact_urls
from common.retries import Answer, with_retries
from data.errors import DataError, TextUnreachable
from data.reading.groups import DataFile

TIMEOUT_SECONDS = 20.0
"""How long a request waits for the next bytes."""
START_SECONDS, START_RATE_LIMIT_SECONDS = 30.0, 330.0
"""How long a start waits before it fails with TextUnreachable, and how long for the end of a rate
limit. The Hub counts over five minutes, and would refuse an attempt that starts again sooner."""
RUN_SECONDS = 6 * 3600.0
"""How long a run waits."""
SHOWN_AFTER_SECONDS, SHOWN_EVERY_SECONDS = 5.0, 60.0
OID = "oid:"
"""Prefix of the versions of Hub files. They belong to a commit, so they cannot change."""
PARTIAL_CONTENT = 206
LOG_IN = "For a private data set of the Hub log in with `hf auth login`, or set HF_TOKEN."


class Access:
    """Reads ranges of bytes. Any thread may call it."""

    def __init__(
        self,
        cache_dir: Path,
        say: Callable[[str], None] | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """`say` prints a line for the user, for example about a wait.

        `warn` prints what is left out, by default like `say`: of several processes, any may be the
        only one to read that.
        """
        self.cache_dir, self.say = cache_dir, say or (lambda line: None)
        self._warn = warn or self.say
        self._most_seconds = RUN_SECONDS
        self._closed = threading.Event()
        self._said_at = -math.inf
        self._left_out: set[str] = set()

    @contextmanager
    def at_start(self) -> Iterator[None]:
        """Waits are short within this context."""
        before, self._most_seconds = self._most_seconds, START_SECONDS
        try:
            yield
        finally:
            self._most_seconds = before

    def close(self) -> None:
        """Close the connections and end all waits: a thread that reads gets TextUnreachable."""
        self._closed.set()
        if "_client" in self.__dict__:
            self._client.close()

    def read(self, source: str, file: DataFile, begin: int, end: int) -> bytes:
        """The bytes of a file from `begin` to `end`, or to the end of the file.

        Waits where a network or a server fails. Raises DataError if the file is refused, has
        changed or vanished, and TextUnreachable after hours.
        """
        end = min(end, file.size)

        def ask() -> bytes:
            content = self._read(file, begin, end)
            if len(content) < end - begin:
                raise Unanswered("the connection ended too early")
            return content

        return self.until_answered(source, ask, f": {file.name}") if begin < end else b""

    def _read(self, file: DataFile, begin: int, end: int) -> bytes:
        if file.system is None:  # on the Hub: a commit cannot change
            with self.get(file.path, of_hub=True, Range=f"bytes={begin}-{end - 1}") as response:
                if response.status_code != PARTIAL_CONTENT:  # some caches send all of it
                    raise Unanswered("the answer is not the range of bytes that was requested")
                return response.read()
        if not file.is_remote:  # fsspec takes twice as long for a small one
            with open(file.path, "rb") as opened:
                _refuse_changed(file, file.system)
                opened.seek(begin)
                return opened.read(end - begin)
        _refuse_changed(file, file.system)
        return bytes(file.system.cat_file(file.path, start=begin, end=end))

    def until_answered(
        self, source: str, request: Callable[[], Answer], subject: str = ""
    ) -> Answer:
        """What `request` returns. It is repeated while the network or the server fails.

        `subject` continues `data.source=...` in the sentence about a failure that lasts.

        Raises DataError for such a failure, and TextUnreachable if nothing answers for too long.
        """
        what = f"data.source={redact_urls(source)}"

        def ask() -> Answer:
            if self._closed.is_set():
                raise TextUnreachable(f"the wait for {what} ended")
            try:
                return request()
            except DataError:
                raise
            except Exception as error:  # each client and each file system has its own types
                raise failure_of(error) from error

        try:
            return with_retries(ask, partial(self._wait, what))
        except Failure as failure:
            raise DataError(f"{what}{subject} {_sentence(failure)}") from failure

    def _wait(self, what: str, failure: Failure, waited: float, delay: float) -> None:
        most, reason, remedy = self._most_seconds, str(failure), "Check the address and the network"
        if failure.retry_after is not None:
            reason += f", and the server asks for a delay of {failure.retry_after:,.0f} s"
            most, remedy = max(most, START_RATE_LIMIT_SECONDS), "Wait that long"
        if waited + delay > most:
            raise TextUnreachable(
                f"{what} cannot be reached: {reason}. Tried for {waited:,.0f} s, of {most:,.0f} s "
                f"at most. {remedy}, and start again."
            )
        now = time.monotonic()
        is_long = waited + delay > SHOWN_AFTER_SECONDS
        if is_long and now - self._said_at >= SHOWN_EVERY_SECONDS:
            self._said_at = now
            self.say(f"waiting for {what}, {waited:.0f} s so far: {reason}")
        self._closed.wait(delay)

    @contextmanager
    def get(self, url: str, of_hub: bool = False, **headers: str) -> Iterator[httpx2.Response]:
        """An open response of a success. Raises an error of httpx2, or Refused."""
        headers["Accept-Encoding"] = "identity"
        if of_hub:
            if constants.HF_HUB_OFFLINE:
                raise Refused("is not requested, because HF_HUB_OFFLINE is set. Unset it.")
            headers |= build_hf_headers()  # with the token of the moment, because tokens expire
        with self._client.stream("GET", url, headers=headers) as response:
            response.raise_for_status()
            yield response

    @cached_property
    def _client(self) -> httpx2.Client:
        """A pool of its own: that of the Hub client is closed when its timeout changes."""
        return httpx2.Client(timeout=TIMEOUT_SECONDS, follow_redirects=True)

    def note_left_out(self, source: str, what: str) -> None:
        """Report what cannot be read and why, once."""
        if what not in self._left_out:
            self._left_out.add(what)
            self._warn(f"warning: data.source={source}: left out: {what}")


def _refuse_changed(file: DataFile, system: AbstractFileSystem) -> None:
    """Raise Refused if a file is not as it was listed."""
    system.invalidate_cache(file.path)  # or it may answer with what it has listed
    if version_of(system.info(file.path)) != file.version:
        raise Refused(
            "has changed since the run listed it. Restore it, or start another run on the files "
            "as they are."
        )


def version_of(info: dict[str, Any]) -> str:
    """A string that changes when the file does, from what fsspec knows about it."""
    keys = ("ETag", "etag", "md5", "mtime", "LastModified", "last_modified", "created")
    version = next((info[key] for key in keys if info.get(key) is not None), "")
    if isinstance(version, datetime):  # some file systems list seconds, and stat dates
        version = version.timestamp()
    return f"{info.get('size')}-{version}"


def _sentence(failure: Failure) -> str:
    """What a failure that lasts says of a file, after its name."""
    cause, status = failure.cause, failure.status
    if isinstance(cause, Refused):
        return str(cause)
    if status in (404, 410) or isinstance(cause, FileNotFoundError):
        is_here = getattr(cause, "errno", None) is not None
        remedy = "Check its name; a data set of the Hub is named owner/name."
        return f"does not exist ({failure}). {remedy if is_here else f'{remedy} {LOG_IN}'}"
    if status in (401, 403) or isinstance(cause, PermissionError):
        return f"is refused ({failure}). Check the credentials and the signature of a URL. {LOG_IN}"
    return f"cannot be read: {failure}. Check the path or the address, and the credentials."
