"""The HTTP server beneath the loopback Hub: routes, scripted faults, and a log of the requests.

A request is read whole, answered from memory while all others wait, and sent. Only what plays the
network takes time: a fault that hangs, a latency, a bandwidth.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

BLOCK_BYTES = 1 << 16
LOOPBACK = "127.0.0.1"
FIRST_PORT = 20_000 + os.getpid() % 20 * 600
"""Of this process. Systems give outgoing connections ports from 32768: ours are free while down."""
_unused_ports = itertools.count(FIRST_PORT + 100)

KINDS = {"refuse", "hang", "reset", "status", "lost-answer", "truncated", "corrupted"}
"""refuse: the connection is closed at once. hang: no answer ever. reset: the connection is reset
after half of the request's body or, where it has none, after half of the answer's. status: that
answer, and nothing applied. lost-answer: applied, and the connection closed; with `status`, applied
and that answer. truncated: half of the announced body. corrupted: some bytes of the body flipped.
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
    seen: int = 0
    """Requests to the endpoint since the fault was scripted."""
    hits: int = 0
    """Those that it hit."""

    def meets(self, endpoint: str) -> bool:
        """Count a request; whether the fault hits it."""
        if self.endpoint not in ("*", endpoint):
            return False
        self.seen += 1
        times = math.inf if self.times is None else self.times
        hit = self.after < self.seen <= self.after + times
        self.hits += hit
        return hit


class Refusal(Exception):
    """The Hub does not do it: the answer's status, its words, and the code that types the error."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


@dataclass(frozen=True)
class Request:
    """A line of the log, in the order of the answers."""

    endpoint: str
    path: str
    status: int | str
    """Of the answer; the kind of the fault, or client-left, where no sound answer went out."""


@dataclass(frozen=True)
class Answer:
    """What a client gets."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def json_answer(content: Any, status: int = 200, **headers: str) -> Answer:
    """An answer in JSON. `headers` have _ for -."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    named["Content-Type"] = "application/json; charset=utf-8"
    return Answer(status, json.dumps(content).encode(), named)


def error_answer(status: int, message: str, code: str = "", **headers: str) -> Answer:
    """An error as the Hub words it, in headers and body."""
    message = message or f"HTTP {status}"
    if code:
        headers["X_Error_Code"] = code
    return json_answer({"error": message}, status, X_Error_Message=message, **headers)


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
    body: bytes

    def json(self) -> Any:
        """The body, as JSON."""
        return json.loads(self.body)


# Routes

DATASETS = "datasets/"
"""Before the name of a repo that is a data set."""
PARTS = {"repo": f"(?:{DATASETS})?[^/]+/[^/]+", "path": ".+"}
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
        hub, target = self.server.hub, urlsplit(self.path)
        endpoint, route, names = hub.find(self.command, target)
        hub.delay()
        fault = hub.take_fault(endpoint)
        try:
            answer, ending = self._outcome(fault, target, route, names)
        except ConnectionError:
            answer, ending = None, "client-left"
        # The log has it before the client can know.
        hub.log(Request(endpoint, self.path, ending or (answer.status if answer else "")))
        # A corrupted answer is whole: a close that no header announced would race the next request.
        self.close_connection |= ending not in ("", "corrupted")
        if ending == "hang":
            self._hang(hub.closing)
        elif answer is not None:
            self._send(answer, ending)
        if ending == "reset":
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            os.close(self.connection.detach())  # past the library, which would end it in order

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815 - names of the library

    def _outcome(
        self, fault: Fault | None, target: SplitResult, route: Route, names: dict[str, str]
    ) -> tuple[Answer | None, str]:
        """The answer, if there is to be one, and the kind of fault under which it goes out."""
        kind = fault.kind if fault else ""
        if kind in ("refuse", "hang"):
            return None, kind
        if kind == "reset" and self._read_half():
            return None, kind
        body = self._body()
        if fault and kind == "status":
            answer = error_answer(fault.status or 500, fault.message)
            answer.headers.update(fault.headers)
            return answer, ""
        hub, query = self.server.hub, parse_qs(target.query, True)
        call = Call(hub, self.command, target.path, query, names, self.headers, body)
        answer = hub.answer(route, call)
        if fault and kind == "lost-answer":
            return (error_answer(fault.status, ""), "") if fault.status else (None, kind)
        return answer, kind

    def _is_chunked(self) -> bool:
        return "chunked" in self.headers.get("Transfer-Encoding", "").lower()

    def _length(self) -> int:
        return int(self.headers.get("Content-Length") or 0)

    def _body(self) -> bytes:
        if not self._is_chunked():
            return self._read(self._length())
        content = bytearray()
        while length := int(self._line().partition(b";")[0], 16):
            content += self._read(length)
            self._line()
        while self._line():
            pass  # trailers
        return bytes(content)

    def _read_half(self) -> bytes:
        """Half of the body, or of its first chunk."""
        return self._read((int(self._line(), 16) if self._is_chunked() else self._length()) // 2)

    def _read(self, length: int) -> bytes:
        """So many bytes of the body, as fast as the network is. Raises ConnectionError."""
        content = bytearray()
        while len(content) < length:
            block = self.rfile.read(min(length - len(content), BLOCK_BYTES))
            if not block:
                raise ConnectionError("the connection ended within the body")
            self.server.hub.carry(len(block))
            content += block
        return bytes(content)

    def _line(self) -> bytes:
        if line := self.rfile.readline(1000):
            return line.strip()
        raise ConnectionError("the connection ended within the body")

    def _send(self, answer: Answer, kind: str) -> None:
        """Send an answer, or what is left of it under a fault of a kind."""
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        body, half = bytearray(answer.body), len(answer.body) // 2
        if kind in ("reset", "truncated"):
            del body[half:]
        if kind == "corrupted":
            body[half : half + 4] = bytes(255 - one for one in body[half : half + 4])
        for at in range(0, len(body) if self.command != "HEAD" else 0, BLOCK_BYTES):
            block = body[at : at + BLOCK_BYTES]
            self.server.hub.carry(len(block))
            self.wfile.write(block)
        self.wfile.flush()

    def _hang(self, closing: threading.Event) -> None:
        """Until the client leaves, or the server goes down."""
        self.connection.settimeout(0.05)
        with suppress(ConnectionError):
            while not closing.is_set():
                with suppress(TimeoutError):
                    if not self.connection.recv(BLOCK_BYTES):
                        return


class Listener(ThreadingHTTPServer):
    """A listening socket with its connections."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, hub: Server, host: str, port: int) -> None:
        self.hub = hub
        self._connections: set[Any] = set()
        super().__init__((host, port), Handler)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def server_bind(self) -> None:
        """Bind without asking for a name, which can take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a connection."""
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client may go away at any time; nothing else may happen."""
        text = traceback.format_exc()
        if "ConnectionResetError" not in text and "BrokenPipeError" not in text:
            self.hub.failures.append(text)

    def stop(self) -> None:
        """Refuse connections from now on, and end those that there are."""
        self.shutdown()
        self._thread.join()
        self.server_close()
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


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
        self.lock = threading.RLock()
        """Held by whoever reads or changes what is stored."""
        self.requests: list[Request] = []
        """What was asked, in the order of the answers."""
        self.failures: list[str] = []
        """What in this server itself does not work."""
        self._host, self._new_port, self._port = host, new_port, 0
        self._listener: Listener | None = None
        self._faults: list[Fault] = []
        self._free_at = 0.0
        """When all that was to be carried is carried, by time.monotonic()."""
        self._random = random.Random(0)

    @property
    def endpoint(self) -> str:
        """Its address, without a slash at the end."""
        return f"http://{self._host}:{self._port}"

    def up(self) -> None:
        """Listen, after `down` at the same address."""
        if not self.closing.is_set():
            return
        self.closing.clear()
        for port in self._ports():
            with suppress(OSError):  # it is taken
                self._listener, self._port = Listener(self, self._host, port), port
                return
        raise OSError("no free port")

    def _ports(self) -> Iterator[int]:
        """Where to listen: as before, where none of this process did, or at the first free port.

        huggingface_hub reads the Hub's address when it is imported. At the same address, the
        processes of several tests can be forked from one that has imported it.
        """
        if self._port:
            return iter([self._port])
        fresh, usual = itertools.islice(_unused_ports, 100), range(FIRST_PORT, FIRST_PORT + 100)
        return iter(fresh if self._new_port else usual)

    def down(self) -> None:
        """Refuse all connections, and cut those that there are. No request is applied any more."""
        with self.lock:
            if self.closing.is_set():
                return
            self.closing.set()
        assert self._listener is not None
        self._listener.stop()

    # What tests script and read.

    def fault(self, endpoint: str, kind: str, **details: Any) -> Fault:
        """Script a fault for the requests to an endpoint, * for all; its count begins now.

        Of several that hit one request, the first is played.
        """
        assert kind in KINDS, kind
        fault = Fault(endpoint, kind, **details)
        with self.lock:
            self._faults.append(fault)
        return fault

    def clear_faults(self) -> None:
        """Forget all faults."""
        with self.lock:
            self._faults.clear()

    def count(self, endpoint: str) -> int:
        """How many requests to an endpoint succeeded."""
        found = [one.status for one in list(self.requests) if one.endpoint == endpoint]
        return sum(isinstance(status, int) and status < 400 for status in found)

    def wait_for(self, predicate: Callable[[], Any], deadline: float = 300.0) -> Any:
        """The first true value of a predicate. Raises AssertionError after so many seconds."""
        end = time.monotonic() + deadline
        while not (value := predicate()):
            last = "\n".join(f"{one.endpoint} {one.status}" for one in self.requests[-20:])
            assert time.monotonic() < end, f"not within {deadline} s; the last requests:\n{last}"
            time.sleep(0.005)
        return value

    # What connections need.

    def find(self, method: str, target: SplitResult) -> tuple[str, Route, dict[str, str]]:
        """Who answers a request: the endpoint, the function, and the parts of the path.

        What is known of models is known of data sets.
        """
        path = re.sub(f"^/api/({DATASETS})", r"/api/models/\1", target.path)
        for of_method, pattern, endpoint, route in ROUTES:
            if of_method == method and (match := pattern.fullmatch(path)):
                names = {name: unquote(part) for name, part in match.groupdict().items()}
                return endpoint, route, names
        return "unknown", unknown, {}

    def answer(self, route: Route, call: Call) -> Answer:
        """The answer of a function, one at a time, and none after `down`."""
        with self.lock:
            if self.closing.is_set():
                raise ConnectionError
            try:
                return route(call)
            except Refusal as refusal:
                return error_answer(refusal.status, refusal.message, refusal.code)
            except Exception:
                self.failures.append(f"{call.method} {call.path}\n{traceback.format_exc()}")
                return error_answer(500, "The loopback Hub failed")

    def log(self, request: Request) -> None:
        """Put a request into the log."""
        with self.lock:
            self.requests.append(request)

    def take_fault(self, endpoint: str) -> Fault | None:
        """The fault that hits a request. All that meet it count it."""
        with self.lock:
            hitting = [fault for fault in self._faults if fault.meets(endpoint)]
        return hitting[0] if hitting else None

    def delay(self) -> None:
        """Wait as long as the network would take."""
        if self.latency[1] > 0:
            self.closing.wait(self._random.uniform(*self.latency))

    def carry(self, size: int) -> None:
        """Wait as long as so many bytes take."""
        with self.lock:
            self._free_at = max(self._free_at, time.monotonic()) + size / self.bytes_per_second
            seconds = self._free_at - time.monotonic()
        if seconds > 0:
            self.closing.wait(seconds)
