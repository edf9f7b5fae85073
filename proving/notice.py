"""A metadata service that announces a preemption, as a cloud's does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

ANSWERS = {
    "/latest/api/token": "token",
    "/latest/meta-data/instance-id": "machine",
    "/latest/meta-data/spot/instance-action": '{"action": "terminate"}',
}
"""As AWS answers (docs.aws.amazon.com, "Spot Instance interruption notices")."""
CLOUD = "aws"


class Announcing(BaseHTTPRequestHandler):
    """Answers every request with a notice."""

    def do_GET(self) -> None:  # the name that the library calls
        """Answer a request."""
        answer = ANSWERS.get(self.path, "").encode()
        self.send_response(200 if answer else 404)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_PUT = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def announcing() -> Iterator[str]:
    """The address of a service on this machine that announces a preemption."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Announcing)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
