"""Stores of files for the tests: a folder, an S3 bucket of moto's server, a bucket of the Hub.

Each can say what it holds, as somebody else sees it, and can fail.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

import hubs
import store.kinds
from loopback_hub import LoopbackHub
from plain_store import PREFIX, PlainFolder
from store.files import Files
from store.kinds import open_store


class Place(ABC):
    """Where a store of files is."""

    url: str
    """Of the store."""
    key: str
    """The configuration key and value that name it."""
    environment: dict[str, str]
    """Of a process that uses it."""

    @abstractmethod
    def open(self, timeout: float = 30.0) -> Files:
        """The store, as a run has it."""

    @abstractmethod
    def paths(self) -> list[str]:
        """Every file that is there."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """The content of a file."""

    @abstractmethod
    def put(self, path: str, content: bytes) -> None:
        """A file that no run has uploaded."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file."""

    def steps(self) -> list[int]:
        """The steps of the whole snapshots."""
        whole = [path for path in self.paths() if path.endswith("/manifest.json")]
        return sorted(int(path.split("-")[1]) for path in whole)


class Folder(Place):
    """A folder of a disk that machines share."""

    def __init__(self, folder: Path, prefix: str = "file://") -> None:
        folder.mkdir()
        self.folder = folder / "run"
        self.url = f"{prefix}{self.folder}"
        self.key, self.environment = f"hub.url={self.url}", {}

    def open(self, timeout: float = 30.0) -> Files:
        return open_store(self.url, timeout)

    def paths(self) -> list[str]:
        found = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return [path.relative_to(self.folder).as_posix() for path in found]

    def read(self, path: str) -> bytes:
        return (self.folder / path).read_bytes()

    def put(self, path: str, content: bytes) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_bytes(content)

    def remove(self, path: str) -> None:
        (self.folder / path).unlink()


class HubBucket(Place):
    """A bucket of the loopback Hub."""

    def __init__(self, hub: LoopbackHub) -> None:
        self.hub, self.bucket = hub, hub.create_bucket("me/run")
        self.url, self.key = "hf://buckets/me/run", "hub.url=hf://buckets/me/run"
        self.environment = hub.environment()

    def open(self, timeout: float = 30.0) -> Files:
        return open_store(self.url, timeout)

    def paths(self) -> list[str]:
        return sorted(self.bucket.files)

    def read(self, path: str) -> bytes:
        return self.bucket.read(path)

    def put(self, path: str, content: bytes) -> None:
        self.open().write(path, BytesIO(content))

    def remove(self, path: str) -> None:
        self.bucket.put(path, None)


@dataclass
class Fault:
    """What goes wrong with some requests to the S3 server."""

    kind: str
    """`status`, `hang`, `reset` or `lost-answer`."""
    method: str
    path: str = ""
    """A part of the address."""
    times: int = 1
    after: int = 0
    """How many of these requests are answered before."""
    status: str = "503 Service Unavailable"
    hits: int = 0

    def meets(self, environ: dict[str, Any]) -> bool:
        """Whether this request fails; counts it."""
        address = f"{environ['PATH_INFO']}?{environ.get('QUERY_STRING', '')}"
        if environ["REQUEST_METHOD"] != self.method or self.path not in address:
            return False
        if self.after:
            self.after -= 1
            return False
        self.hits += self.hits < self.times
        self.times -= 1
        return self.times >= 0


@dataclass
class S3(Place):
    """A bucket of moto's server on 127.0.0.1, which speaks S3, and can fail."""

    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            protocol_version = "HTTP/1.1"

            def log(self, *_: object) -> None:
                pass

        app = DomainDispatcherApplication(create_backend_app)
        self._ended = threading.Event()
        self.server = make_server(
            "127.0.0.1", 0, self._with_faults(app), threaded=True, request_handler=Quiet
        )
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server.port}",
            "AWS_ACCESS_KEY_ID": "of-the-test",
            "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        self.url, self.key = "s3://shared/run", "hub.url=s3://shared/run"
        import boto3

        self.client = boto3.client("s3", **self._named())
        request = Request(f"{self.environment['AWS_ENDPOINT_URL']}/moto-api/reset", method="POST")
        urlopen(request).close()  # all servers of a process have one state
        self.client.create_bucket(Bucket="shared")
        self.requests.clear()

    def _named(self) -> dict[str, str]:
        found = self.environment
        return {
            "endpoint_url": found["AWS_ENDPOINT_URL"],
            "aws_access_key_id": found["AWS_ACCESS_KEY_ID"],
            "aws_secret_access_key": found["AWS_SECRET_ACCESS_KEY"],
            "region_name": found["AWS_DEFAULT_REGION"],
        }

    def _with_faults(self, app: Callable) -> Callable:
        def answer(environ, start_response):
            self.requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
            fault = next((one for one in self.faults if one.meets(environ)), None)
            if fault is None:
                return app(environ, start_response)
            if fault.kind == "hang":
                self._ended.wait(60)
            if fault.kind == "lost-answer":
                list(app(environ, lambda *_: lambda _: None))
            if fault.kind == "status":
                start_response(fault.status, [("Content-Length", "0"), ("Connection", "close")])
                return [b""]
            with suppress(OSError):
                environ["werkzeug.socket"].close()
            raise ConnectionAbortedError

        return answer

    def fault(self, kind: str, method: str, **more: Any) -> Fault:
        """From now on."""
        self.faults.append(Fault(kind, method, **more))
        return self.faults[-1]

    def close(self) -> None:
        self._ended.set()
        self.server.shutdown()

    def open(self, timeout: float = 30.0) -> Files:
        return open_store(self.url, timeout)

    def paths(self) -> list[str]:
        found = self.client.list_objects_v2(Bucket="shared", Prefix="run/").get("Contents", [])
        return sorted(entry["Key"].removeprefix("run/") for entry in found)

    def read(self, path: str) -> bytes:
        return self.client.get_object(Bucket="shared", Key=f"run/{path}")["Body"].read()

    def put(self, path: str, content: bytes) -> None:
        self.client.put_object(Bucket="shared", Key=f"run/{path}", Body=content)

    def remove(self, path: str) -> None:
        self.client.delete_object(Bucket="shared", Key=f"run/{path}")


@contextmanager
def _folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    yield Folder(folder / "shared")


@contextmanager
def _s3(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    server = S3()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def _hub_bucket(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with LoopbackHub(folder / "hub", new_port=True) as hub:
        hubs.lead_here(hub, monkeypatch)
        yield HubBucket(hub)


@contextmanager
def _somebody_s(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr("store.kinds.KINDS", {PREFIX: PlainFolder, **store.kinds.KINDS})
    yield Folder(folder / "shared", PREFIX)


SHIPPED = {"a folder": _folder, "S3": _s3, "a bucket of the Hub": _hub_bucket}
"""Every kind of store of files: a new one is a line here, and all tests of stores run with it."""
KINDS = {**SHIPPED, "somebody's store": _somebody_s}
"""And one that only this process knows."""


def cases(kinds: Iterable[str]) -> list[Any]:
    """Parameters of a test; those that need a server are thorough."""
    quick = ("a folder", "somebody's store")
    marks = {kind: () if kind in quick else pytest.mark.thorough for kind in kinds}
    return [pytest.param(kind, marks=mark) for kind, mark in marks.items()]


@contextmanager
def place(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A store of a kind, to which this process is led; what fails is soon tried again."""
    monkeypatch.setattr("store.uploader.FIRST_DELAY_SECONDS", 0.1)
    monkeypatch.setattr("store.uploader.FLUSH_DELAY_SECONDS", 0.5)
    monkeypatch.setattr("common.retries.FIRST_DELAY_SECONDS", 0.1)
    monkeypatch.setattr("common.retries.BRIEF_DELAY_SECONDS", 0.2)
    with KINDS[kind](folder, monkeypatch) as found:
        yield found


def wait_for(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Until it holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
