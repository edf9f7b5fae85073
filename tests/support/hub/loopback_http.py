"""How the loopback Hub speaks HTTP: connections, and how they end badly."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from loopback_contents import BLOCK_BYTES, Refusal
from loopback_faults import Fault
from loopback_messages import Answer, Body, Call, ClientLeft, Route, error_answer
from loopback_routes import BLOBS, HUB, Found

if TYPE_CHECKING:
    from loopback_hub import LoopbackHub

PORTS = range(20_000, 32_000)
"""Below those that systems give to outgoing connections: none is taken while we are down."""
GRACE_SECONDS = 2.0
"""For requests under way when the hub goes down."""


class Handler(BaseHTTPRequestHandler):
    """One connection; requests follow each other on it."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and a small body in one packet
    disable_nagle_algorithm = True
    server: Origin

    def log_message(self, format: str, *args: object) -> None:
        """The log is the hub's."""

    def _serve(self) -> None:
        hub = self.server.hub
        if not hub.doors.enter():
            self.close_connection = True
            return
        try:
            self._answer(hub)
        finally:
            hub.doors.leave()

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815 - names of the library

    def _answer(self, hub: LoopbackHub) -> None:
        target = urlsplit(self.path)
        endpoint, route, names = self.server.find(self.command, target.path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        request = hub.arrived(endpoint, self.command, self.path, token)
        hub.delay()
        fault, changes = hub.faults.take(endpoint)
        kinds = [fault.kind] if fault else []
        request = replace(request, fault=" ".join([*kinds, *sorted(changes)]))
        body, query = Body(self.rfile, self.headers, hub.carry), parse_qs(target.query)
        call = Call(hub, self.command, target.path, query, names, self.headers, body, changes)
        try:
            answer, ending = self._outcome(route, call, fault)
        except (ClientLeft, ConnectionError):
            answer, ending = None, "client-left"
        # The log has it before the client can know.
        hub.log(replace(request, status=ending or (answer.status if answer else "")))
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
            call.body.skip()
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
        call.body.skip()
        if call.hub.deviations.no_error_codes:
            for name in ("X-Error-Code", "X-Error-Message"):
                answer.headers.pop(name, None)
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

    def _hang(self, hub: LoopbackHub) -> None:
        self.connection.settimeout(0.05)
        with suppress(ConnectionError):
            while not hub.doors.closing.is_set():
                with suppress(TimeoutError):
                    if not self.connection.recv(BLOCK_BYTES):
                        return

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())  # past the library, which would end it in order first


class Origin(ThreadingHTTPServer):
    """A listening socket with its connections."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(
        self, hub: LoopbackHub, find: Callable[[str, str], Found], host: str, port: int
    ) -> None:
        self.hub, self.find = hub, find
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


_released: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
"""The ports of this process's former hubs, by host and origin. The next hub takes them.

huggingface_hub reads the Hub's address when it is imported. At the same address, the processes of
several tests can be forked from one that has imported it.
"""


class Doors:
    """The listening sockets of a hub: its own and, at another origin, that for large contents."""

    def __init__(
        self,
        hub: LoopbackHub,
        find: Callable[[str, str, str], Found],
        host: str,
        new_port: bool,
    ) -> None:
        self.closing = threading.Event()
        """Set when there is no time to wait any more."""
        self.closing.set()
        self._hub, self._find, self._host, self._new_port = hub, find, host, new_port
        self._origins: dict[str, Origin] = {}
        self._ports: dict[str, int] = {}
        self._under_way = 0
        self._changed = threading.Condition()

    def address(self, origin: str) -> str:
        """Where an origin listens."""
        return f"http://{self._host}:{self._ports[origin]}"

    def open(self) -> None:
        """Listen, later again at the same addresses."""
        if self.closing.is_set():
            self.closing.clear()
            for name in (HUB, BLOBS):
                self._origins[name] = self._listen(name)

    def close(self) -> None:
        """Refuse connections, and end those that there are."""
        with self._changed:
            if self.closing.is_set():
                return
            self.closing.set()
        for origin in self._origins.values():
            origin.stop_listening()
        for _ in range(2):
            with self._changed:
                self._changed.wait_for(lambda: self._under_way == 0, GRACE_SECONDS)
            for origin in self._origins.values():
                origin.cut()
        with self._changed:
            assert self._under_way == 0, f"{self._under_way} requests do not end"

    def release(self) -> None:
        """Leave the ports to the next hub of this process. This one must not open again."""
        if not self._new_port:
            for name, port in self._ports.items():
                _released[self._host, name].append(port)
        self._ports.clear()

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

    def _listen(self, name: str) -> Origin:
        find = partial(self._find, name)
        if name in self._ports:
            return Origin(self._hub, find, self._host, self._ports[name])
        released = [] if self._new_port else _released[self._host, name]
        first = secrets.randbelow(len(PORTS))  # of the system: seeded tests share no port
        for port in (*released, *PORTS[first:], *PORTS[:first]):
            try:
                origin = Origin(self._hub, find, self._host, port)
            except OSError:  # taken
                continue
            self._ports[name] = port
            if port in released:
                released.remove(port)
            return origin
        raise OSError(f"no free port in {PORTS}")
