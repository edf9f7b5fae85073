"""A small HTTP server for texts, which answers as a test says: well, badly, slowly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Piece = bytes | Callable[[], object]
Answer = tuple[int, Mapping[str, str], Iterable[Piece]]
"""Status, headers, and the body: bytes to send, and functions to call in between."""
Asked = list[tuple[str, dict[str, str]]]
"""Path and headers of each request."""


@contextmanager
def serving(answer_to: Callable[[str], Answer]) -> Iterator[tuple[str, Asked]]:
    """A server on a port of this machine; its address, and what it has been asked.

    `answer_to` gives the answer to a path with its query.
    """
    asked: Asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, dict(self.headers)))
            status, headers, pieces = answer_to(self.path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            for piece in pieces:
                if callable(piece):
                    piece()
                else:
                    self.wfile.write(piece)
                    self.wfile.flush()

        def log_message(self, *_: object) -> None:
            """Nothing: the tests look at `asked`."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()
