"""What passes between the loopback Hub and its clients: bodies in blocks, answers, the log."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from email.message import Message
from io import BufferedIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from loopback_contents import BLOCK_BYTES, Refusal, blocks_of

if TYPE_CHECKING:
    from loopback_hub import LoopbackHub


class ClientLeft(Exception):
    """The connection ended within the request's body."""


@dataclass(frozen=True)
class Request:
    """A line of the hub's log."""

    number: int
    """In the order of arrival; the log is in the order of the answers."""
    time: float
    """Of the arrival, by time.monotonic()."""
    endpoint: str
    method: str
    path: str
    token: str | None
    status: int | str = ""
    """Of the answer; the kind of the fault, or client-left, where no sound answer went out."""
    fault: str = ""
    """The kinds that hit it."""


class Body:
    """The body of a request, of a known length or in chunks, read from the connection."""

    def __init__(
        self, stream: BufferedIOBase, headers: Message, carry: Callable[[int], None]
    ) -> None:
        """`carry` waits as long as the network takes for so many bytes."""
        self._stream, self._carry = stream, carry
        self._length = int(headers.get("Content-Length") or 0)
        self._is_chunked = "chunked" in headers.get("Transfer-Encoding", "").lower()
        self.is_empty = not self._is_chunked and self._length == 0
        self._rest = self._in_chunks() if self._is_chunked else self._counted(self._length)

    def blocks(self) -> Iterator[bytes]:
        """What is not read yet. Raises ClientLeft."""
        return self._rest

    def read(self) -> bytes:
        """All of it."""
        return b"".join(self._rest)

    def json(self) -> Any:
        """All of it, as JSON."""
        try:
            return json.loads(self.read())
        except ValueError as error:
            raise Refusal(400, f"Invalid JSON: {error}") from error

    def skip(self) -> None:
        """Read the rest, so that the next request can follow."""
        for _ in self._rest:
            pass

    def read_half(self) -> None:
        """Half of it, or of its first chunk."""
        length = int(self._line(), 16) if self._is_chunked else self._length
        for _ in self._counted(length // 2):
            pass

    def _in_chunks(self) -> Iterator[bytes]:
        while length := int(self._line().partition(b";")[0], 16):
            yield from self._counted(length)
            self._line()
        while self._line():
            pass  # trailers

    def _counted(self, length: int) -> Iterator[bytes]:
        while length:
            block = self._stream.read(min(length, BLOCK_BYTES))
            if not block:
                raise ClientLeft
            length -= len(block)
            self._carry(len(block))
            yield block

    def _line(self) -> bytes:
        line = self._stream.readline(1000)
        if not line:
            raise ClientLeft
        return line.strip()


@dataclass(frozen=True)
class Stretch:
    """A part of a file, as the body of an answer."""

    path: Path
    start: int
    size: int


@dataclass(frozen=True)
class Answer:
    """What a client gets."""

    status: int = 200
    body: bytes | Stretch = b""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return self.body.size if isinstance(self.body, Stretch) else len(self.body)

    def blocks(self) -> Iterable[bytes]:
        """The body, a block at a time."""
        if isinstance(self.body, Stretch):
            return blocks_of(self.body.path, self.body.start, self.body.size)
        return [self.body]


def json_answer(content: Any, status: int = 200, **headers: str) -> Answer:
    """An answer in JSON. `headers` have _ for -."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    named["Content-Type"] = "application/json; charset=utf-8"
    return Answer(status, json.dumps(content).encode(), named)


def error_answer(status: int, message: str, code: str = "", **headers: str) -> Answer:
    """An error as the Hub words it, in headers and body."""
    message = message or f"HTTP {status}"
    headers["X_Error_Message"] = message.encode("ascii", "replace").decode().replace("\n", " ")
    if code:
        headers["X_Error_Code"] = code
    return json_answer({"error": message}, status, **headers)


@dataclass(frozen=True)
class Call:
    """A request on its way to the function that answers it."""

    hub: LoopbackHub
    method: str
    path: str
    """Without the query, still percent-encoded."""
    query: dict[str, list[str]]
    names: dict[str, str]
    """The variable parts of the path, decoded."""
    headers: Message
    body: Body
    changes: frozenset[str]
    """Kinds of faults that change the answer."""

    def form(self) -> dict[str, list[str]]:
        """The body, as a form."""
        return parse_qs(self.body.read().decode())


Route = Callable[[Call], Answer]
