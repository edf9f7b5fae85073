"""The HTTP server beneath the loopback Hub: routes, scripted faults, a log, and how answers end."""

from __future__ import annotations

import json
import math
import os
import random
import re
import secrets
import socket
import struct
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

BLOCK_BYTES = 1 << 20
PORTS = range(20_000, 32_000)
"""Below those that systems give to outgoing connections: none is taken while we are down."""
GRACE_SECONDS = 2.0
"""For requests under way when the server goes down."""
LOOPBACK = "127.0.0.1"

# Faults


MODIFIERS = frozenset({"stale-head", "partial"})
"""Kinds that change what is answered, but not whether: those of `Call.changes`."""
KINDS = MODIFIERS | {"refuse", "hang", "reset", "status", "lost-answer", "truncated", "corrupted"}
"""refuse: the connection is closed at once. hang: no answer ever. reset: the connection is reset
after half of the request's body or, where it has none, after half of the answer's. status: that
answer, and nothing applied. lost-answer: applied, and the connection closed; with `status`, applied
and that answer. truncated: half of the announced body. corrupted: some bytes of the body flipped.
stale-head: main as it was one commit ago. partial: the second half of a batch is not applied.
"""


@dataclass
class Fault:
    """One scripted fault, and how far it has come."""

    endpoint: str
    """As `answers` names it; * for all."""
    kind: str
    after: int = 0
    """How many requests pass before."""
    times: int | None = 1
    """How many are hit; None for all until `clear_faults`."""
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    message: str = ""
    code: str = ""
    seen: int = 0
    """Requests to the endpoint since the fault was scripted."""
    hits: int = 0
    """Those that it hit."""

    def meets(self, endpoint: str) -> bool:
        """Count a request; whether the fault hits it."""
        if self.endpoint not in ("*", endpoint):
            return False
        self.seen += 1
        ended = self.times is not None and self.seen > self.after + self.times
        if self.seen <= self.after or ended:
            return False
        self.hits += 1
        return True


# Requests and answers


class Refusal(Exception):
    """The Hub does not do it: the answer's status, its words, and the code that types the error."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class ClientLeft(Exception):
    """The connection ended within the request's body."""


@dataclass(frozen=True)
class Request:
    """A line of the log, in the order of the answers."""

    time: float
    """Of the arrival, by time.monotonic()."""
    endpoint: str
    path: str
    status: int | str = ""
    """Of the answer; the kind of the fault, or client-left, where no sound answer went out."""


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

    def blocks(self) -> Iterator[bytes]:
        """The body, a block at a time."""
        if isinstance(self.body, bytes):
            yield self.body
            return
        left = self.body.size
        with self.body.path.open("rb") as file:
            file.seek(self.body.start)
            while left > 0 and (block := file.read(min(left, BLOCK_BYTES))):
                left -= len(block)
                yield block


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

    hub: Any
    """The LoopbackHub."""
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


# Routes


SPACES, DATASETS = "spaces/", "datasets/"
"""Before the name of a repo that is a Space, or a data set."""
PARTS = {"repo": f"(?:{SPACES}|{DATASETS})?[^/]+/[^/]+", "path": ".+"}
Route = Callable[[Call], Answer]
ROUTES: list[tuple[str, re.Pattern[str], str, Route]] = []
"""Method, path, endpoint, and the function that answers."""


def answers(endpoint: str, method: str, path: str) -> Callable[[Route], Route]:
    """Make a function that of an endpoint. `{name}` stands for a variable part of the path."""
    shape = re.sub(r"\{(\w+)\}", lambda at: f"(?P<{at[1]}>{PARTS.get(at[1], '[^/]+')})", path)

    def note(route: Route) -> Route:
        ROUTES.append((method, re.compile(shape), endpoint, route))
        return route

    return note


def route_of(method: str, path: str) -> tuple[str, Route, dict[str, str]]:
    """Who answers a request. What is known of models is known of Spaces and data sets."""
    path = re.sub(f"^/api/({SPACES}|{DATASETS})", r"/api/models/\1", path)
    for of_method, pattern, endpoint, route in ROUTES:
        if of_method == method and (match := pattern.fullmatch(path)):
            names = {name: unquote(part) for name, part in match.groupdict().items()}
            return endpoint, route, names
    return "unknown", unknown, {}


def unknown(call: Call) -> Answer:
    """For what no function answers."""
    raise Refusal(404, f"The loopback Hub does not know {call.method} {call.path}")


# Connections


class Handler(BaseHTTPRequestHandler):
    """One connection; requests follow each other on it."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and a small body in one packet
    disable_nagle_algorithm = True
    server: Listener

    def log_message(self, format: str, *args: object) -> None:
        """The log is the hub's."""

    def handle_expect_100(self) -> bool:
        """Let the body come; clients of S3 wait for that."""
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def _serve(self) -> None:
        hub = self.server.hub
        if not hub.enter():
            self.close_connection = True
            return
        try:
            self._answer(hub)
        finally:
            hub.leave()

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815 - names of the library

    def _answer(self, hub: Server) -> None:
        arrived, target = time.monotonic(), urlsplit(self.path)
        endpoint, route, names = hub.find(self.command, target)
        hub.delay()
        fault, changes = hub.take_fault(endpoint)
        body, query = Body(self.rfile, self.headers, hub.carry), parse_qs(target.query, True)
        call = Call(hub, self.command, target.path, query, names, self.headers, body, changes)
        try:
            answer, ending = self._outcome(route, call, fault)
        except (ClientLeft, ConnectionError):
            answer, ending = None, "client-left"
        # The log has it before the client can know.
        status = ending or (answer.status if answer else "")
        hub.log(Request(arrived, endpoint, self.path, status))
        # A corrupted answer is whole: a close that no header announced would race the next request.
        self.close_connection = self.close_connection or ending not in ("", "corrupted")
        if ending == "hang":
            self._hang(hub)
        elif answer is not None:
            self._send(answer, ending)
        if ending == "reset":
            self._reset()

    def _outcome(self, route: Route, call: Call, fault: Fault | None) -> tuple[Answer | None, str]:
        """The answer, if there is to be one, and the kind of fault under which it goes out."""
        if fault is None:
            return self._call(route, call), ""
        if fault.kind == "status":
            call.body.read()
            answer = error_answer(fault.status or 500, fault.message, fault.code)
            answer.headers.update(fault.headers)
            return answer, ""
        if fault.kind in ("refuse", "hang"):
            return None, fault.kind
        if fault.kind == "reset" and not call.body.is_empty:
            call.body.read_half()
            return None, fault.kind
        answer = self._call(route, call)
        if fault.kind == "lost-answer":
            return (error_answer(fault.status, ""), "") if fault.status else (None, fault.kind)
        return answer, fault.kind

    def _call(self, route: Route, call: Call) -> Answer:
        try:
            answer = route(call)
        except Refusal as refusal:
            answer = error_answer(refusal.status, refusal.message, refusal.code)
        except (ClientLeft, ConnectionError):
            raise
        except Exception:
            call.hub.failed(f"{call.method} {call.path}\n{traceback.format_exc()}")
            answer = error_answer(500, "The loopback Hub failed")
        for _ in call.body.blocks():  # so that the next request can follow
            pass
        return answer

    def _send(self, answer: Answer, kind: str) -> None:
        """Send an answer, or what is left of it under a fault of a kind."""
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(answer.length))
        self.end_headers()
        half = answer.length // 2
        end = half if kind in ("reset", "truncated") else answer.length
        sent = 0
        for block in answer.blocks() if self.command != "HEAD" else ():
            block = block[: end - sent]
            if kind == "corrupted" and sent <= half < sent + len(block):
                flipped = bytearray(block)
                for at in range(half - sent, min(half - sent + 4, len(block))):
                    flipped[at] ^= 0xFF
                block = bytes(flipped)
            self.server.hub.carry(len(block))
            self.wfile.write(block)
            sent += len(block)
        self.wfile.flush()

    def _hang(self, hub: Server) -> None:
        self.connection.settimeout(0.05)
        with suppress(ConnectionError):
            while not hub.closing.is_set():
                with suppress(TimeoutError):
                    if not self.connection.recv(BLOCK_BYTES):
                        return

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())  # past the library, which would end it in order first


class Listener(ThreadingHTTPServer):
    """A listening socket with its connections."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(self, hub: Server, host: str, port: int) -> None:
        self.hub = hub
        self._connections: set[Any] = set()
        self._lock = threading.Lock()
        super().__init__((host, port), Handler)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def server_bind(self) -> None:
        """Bind without asking for a name, which can take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a connection."""
        with self._lock:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        with self._lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client may go away at any time; nothing else may happen."""
        text = traceback.format_exc()
        if "ConnectionResetError" not in text and "BrokenPipeError" not in text:
            self.hub.failed(text)

    def stop_listening(self) -> None:
        """Refuse connections from now on."""
        self.shutdown()
        self._thread.join()
        self.server_close()

    def cut(self) -> None:
        """End all connections."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


_released: defaultdict[str, list[int]] = defaultdict(list)
"""The ports of this process's former servers, by host. The next server takes them.

huggingface_hub reads the Hub's address when it is imported. At the same address, the processes of
several tests can be forked from one that has imported it.
"""


class Server:
    """A server, up from `up` to `down`. Every method may be called from any thread."""

    def __init__(self, host: str, new_port: bool) -> None:
        self.latency = (0.0, 0.0)
        """Seconds added to each request, from and to."""
        self.bytes_per_second = math.inf
        """What all connections carry together, bodies of requests and of answers."""
        self.closing = threading.Event()
        """Set when there is no time to wait any more."""
        self.closing.set()
        self._host, self._new_port, self._port = host, new_port, 0
        self._listener: Listener | None = None
        self._changed = threading.Condition(threading.RLock())
        self._changes = self._under_way = 0
        self._requests: list[Request] = []
        self._faults: list[Fault] = []
        self._failures: list[str] = []
        self._free_at = 0.0
        """When all that was to be carried is carried, by time.monotonic()."""
        self._random = random.Random(0)

    @property
    def endpoint(self) -> str:
        """Its address, without a slash at the end."""
        return f"http://{self._host}:{self._port}"

    @property
    def contents_endpoint(self) -> str:
        """Its address under another name, where large contents are: another origin, as the Hub's
        storage is. 10.77.1 is 10.77.0.1, which needs no server of names."""
        first, second, third, last = self._host.split(".")
        number = f"{first}.{second}.{256 * int(third) + int(last)}"
        return f"http://{'localhost' if self._host == LOOPBACK else number}:{self._port}"

    def up(self) -> None:
        """Listen, after `down` at the same address."""
        if not self.closing.is_set():
            return
        self.closing.clear()
        released = [] if self._new_port else _released[self._host]
        first = secrets.randbelow(len(PORTS))  # of the system: seeded tests share no port
        ports = (*released, *PORTS[first:], *PORTS[:first])
        for port in (self._port,) if self._port else ports:
            try:
                self._listener = Listener(self, self._host, port)
            except OSError:  # taken
                continue
            self._port = port
            if port in released:
                released.remove(port)
            return
        raise OSError(f"no free port in {PORTS}")

    def down(self) -> None:
        """Refuse all connections. Afterwards no request is under way, and none is applied.

        Those under way may end first, for a while; what hangs is cut at once.
        """
        with self._changed:
            if self.closing.is_set():
                return
            self.closing.set()
        assert self._listener is not None
        self._listener.stop_listening()
        for _ in range(2):
            with self._changed:
                self._changed.wait_for(lambda: self._under_way == 0, GRACE_SECONDS)
            self._listener.cut()
        with self._changed:
            assert self._under_way == 0, f"{self._under_way} requests do not end"

    def release(self) -> None:
        """Leave the port to the next server of this process. This one must not open again."""
        if not self._new_port:
            _released[self._host].append(self._port)

    # What tests script and read.

    def fault(self, endpoint: str, kind: str, **details: Any) -> Fault:
        """Script a fault for the requests to an endpoint, * for all; its count begins now.

        Of several that hit one request, the first is played, with those that only change answers.
        """
        assert kind in KINDS, kind
        fault = Fault(endpoint, kind, **details)
        with self._changed:
            self._faults.append(fault)
        return fault

    def clear_faults(self) -> None:
        """Forget all faults."""
        with self._changed:
            self._faults.clear()

    @property
    def requests(self) -> list[Request]:
        """What was asked, in the order of the answers."""
        with self._changed:
            return list(self._requests)

    def count(self, endpoint: str) -> int:
        """How many requests to an endpoint succeeded."""
        return sum(
            one.endpoint == endpoint and isinstance(one.status, int) and one.status < 400
            for one in self.requests
        )

    def wait_for(self, predicate: Callable[[], Any], deadline: float = 300.0) -> Any:
        """The first true value of a predicate, looked at after every request and every change.

        Raises AssertionError after so many seconds. No lock is held while the predicate looks.
        """
        end = time.monotonic() + deadline
        while True:
            seen = self._changes
            if value := predicate():
                return value
            if time.monotonic() >= end:
                last = "\n".join(f"{one.endpoint} {one.status}" for one in self.requests[-20:])
                raise AssertionError(f"not within {deadline} seconds; the last requests:\n{last}")
            with self._changed:
                if self._changes == seen:
                    self._changed.wait(max(0.0, end - time.monotonic()))

    # What connections need.

    def find(self, method: str, target: SplitResult) -> tuple[str, Route, dict[str, str]]:
        """Who answers a request: the endpoint, the function, and the parts of the path."""
        return route_of(method, target.path)

    def notify(self) -> None:
        """Let those who wait look again."""
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def log(self, request: Request) -> None:
        """Put a request into the log."""
        with self._changed:
            self._requests.append(request)
        self.notify()

    def failed(self, failure: str) -> None:
        """Note that this server itself does not work; it is raised at the end."""
        with self._changed:
            self._failures.append(failure)

    def take_fault(self, endpoint: str) -> tuple[Fault | None, frozenset[str]]:
        """What hits a request: the fault that is played, and the kinds that change the answer."""
        with self._changed:
            hitting = [fault for fault in self._faults if fault.meets(endpoint)]
        played = [fault for fault in hitting if fault.kind not in MODIFIERS]
        changes = frozenset(fault.kind for fault in hitting if fault.kind in MODIFIERS)
        return (played[0] if played else None), changes

    def enter(self) -> bool:
        """Begin a request; False when no more is taken."""
        with self._changed:
            is_open = not self.closing.is_set()
            self._under_way += is_open
            return is_open

    def leave(self) -> None:
        """End a request."""
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def delay(self) -> None:
        """Wait as long as the network would take."""
        if self.latency[1] > 0:
            with self._changed:
                seconds = self._random.uniform(*self.latency)
            self.closing.wait(seconds)

    def carry(self, size: int) -> None:
        """Wait as long as so many bytes take."""
        with self._changed:
            self._free_at = max(self._free_at, time.monotonic()) + size / self.bytes_per_second
            seconds = self._free_at - time.monotonic()
        if seconds > 0:
            self.closing.wait(seconds)
