"""Stores for the tests: a repo of the Hub, a bucket, an S3 bucket of moto's server, a folder.

Each says what it holds, as somebody else sees it. Those that are servers can fail.
"""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from fsspec.core import url_to_fs
from fsspec.implementations.memory import MemoryFileSystem

import hubs
from loopback_hub import LoopbackHub
from store.kinds import open_store
from store.latest import Latest
from store.store import Store


class Place(ABC):
    """Where a store is."""

    url: str
    """Of the store."""
    key: str
    """The configuration key and value that name it."""
    environment: dict[str, str]
    """Of a process that uses it."""

    def open(self, timeout: float = 30.0) -> Store:
        """The store, as a run has it."""
        return open_store(self.url, timeout)

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

    def fault(self, endpoint: str, kind: str, **details: Any) -> Any:
        """From now on, some requests fail; `hits` of the fault counts them."""
        raise NotImplementedError

    def steps(self) -> list[int]:
        """The steps of the whole snapshots."""
        return sorted(int(folder.split("-")[1]) for folder in self.whole())

    def whole(self) -> list[str]:
        """The folders that have a manifest."""
        paths = self.paths()
        return [path.rpartition("/")[0] for path in paths if path.endswith("/manifest.json")]

    def latest(self) -> Latest | None:
        """`latest.json`, as a start reads it."""
        store = self.open()
        return store.latest(store.head())

    def assert_whole(self) -> None:
        """A folder with a manifest has all files that this lists, and no other."""
        paths = set(self.paths())
        for folder in self.whole():
            manifest = json.loads(self.read(f"{folder}/manifest.json"))
            entries = {f"{folder}/{one['path']}": one for one in manifest["files"]}
            inside = {path for path in paths if path.startswith(f"{folder}/")}
            assert inside == {f"{folder}/manifest.json", *entries}
            for path, entry in entries.items():
                content = self.read(path)
                found = (len(content), sha256(content).hexdigest())
                assert found == (entry["size"], entry["sha256"])


class Folder(Place):
    """A folder that fsspec can open: of a disk that machines share, or of this process's memory."""

    def __init__(self, url: str) -> None:
        self.url, self.key, self.environment = url, f"hub.url={url}", {}
        self.fs, self.root = url_to_fs(url)
        self.fs.makedirs(self.root.rpartition("/")[0], exist_ok=True)

    def paths(self) -> list[str]:
        return sorted(path.removeprefix(f"{self.root}/") for path in self.fs.find(self.root))

    def read(self, path: str) -> bytes:
        return self.fs.cat_file(f"{self.root}/{path}")

    def put(self, path: str, content: bytes) -> None:
        place = f"{self.root}/{path}"
        self.fs.makedirs(place.rpartition("/")[0], exist_ok=True)
        self.fs.pipe_file(place, content)

    def remove(self, path: str) -> None:
        self.fs.rm_file(f"{self.root}/{path}")


class OfTheHub(Place):
    """A store of a loopback Hub."""

    def __init__(self, hub: LoopbackHub, url: str, key: str) -> None:
        self.hub, self.url, self.key = hub, url, key
        self.environment = hub.environment()

    def fault(self, endpoint: str, kind: str, **details: Any) -> Any:
        return self.hub.fault(endpoint, kind, **details)


class HubRepo(OfTheHub):
    """A repo."""

    def __init__(self, hub: LoopbackHub) -> None:
        super().__init__(hub, f"hf://{hubs.REPO}", f"hub.repo_id={hubs.REPO}")
        self.repo = hub.create(hubs.REPO)

    def paths(self) -> list[str]:
        return sorted(self.repo.files("main"))

    def read(self, path: str) -> bytes:
        return self.repo.read("main", path)

    def put(self, path: str, content: bytes) -> None:
        self.hub.commit_files(hubs.REPO, {path: content})

    def remove(self, path: str) -> None:
        self.hub.commit_files(hubs.REPO, {}, [path])

    def assert_whole(self) -> None:
        """So was every commit, and no content was sent twice."""
        super().assert_whole()
        hubs.assert_always_whole(self.hub)
        assert set(self.hub.uploaded.values()) <= {1}


class HubBucket(OfTheHub):
    """A bucket."""

    def __init__(self, hub: LoopbackHub) -> None:
        super().__init__(hub, "hf://buckets/me/run", "hub.url=hf://buckets/me/run")
        self.bucket = hub.create_bucket("me/run")

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

    endpoint: str
    """The method, and maybe a part of the address: `PUT manifest`."""
    kind: str
    """`status`, `hang`, `reset` or `lost-answer`."""
    times: int = 1
    after: int = 0
    """How many of these requests are answered before."""
    status: str = "503 Service Unavailable"
    hits: int = 0

    def meets(self, environ: dict[str, Any]) -> bool:
        """Whether this request fails; counts it."""
        method, _, part = self.endpoint.partition(" ")
        address = f"{environ['PATH_INFO']}?{environ.get('QUERY_STRING', '')}"
        if environ["REQUEST_METHOD"] != method or part not in address:
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

    def fault(self, endpoint: str, kind: str, **details: Any) -> Fault:
        self.faults.append(Fault(endpoint, kind, **details))
        return self.faults[-1]

    def close(self) -> None:
        self._ended.set()
        self.server.shutdown()

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
    yield Folder(f"file://{folder}/shared/run")


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
def _of_hub(
    kind: type[HubRepo | HubBucket],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    use_xet: bool = True,
) -> Iterator[Place]:
    with LoopbackHub(folder / "hub", new_port=True, use_xet=use_xet) as hub:
        hubs.lead_here(hub, monkeypatch)
        yield kind(hub)


@contextmanager
def _memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    MemoryFileSystem.store.clear()
    yield Folder("memory://shared/run")


FILES = {"a folder": _folder, "S3": _s3, "a bucket of the Hub": partial(_of_hub, HubBucket)}
"""Every kind of store of files that other processes can use: a new one is a line here."""
KINDS = {**FILES, "another file system": _memory, "a repo": partial(_of_hub, HubRepo)}
"""All kinds; all tests of stores run with them."""
VARIANTS = {"a repo without Xet": partial(_of_hub, HubRepo, use_xet=False)}
"""Kinds for tests of their own."""
THOROUGH = {"S3", "a bucket of the Hub"}


def cases(kinds: Iterable[str]) -> list[Any]:
    """Parameters of a test; two that need a server are thorough."""
    marks = {kind: pytest.mark.thorough if kind in THOROUGH else () for kind in kinds}
    return [pytest.param(kind, marks=mark) for kind, mark in marks.items()]


@contextmanager
def place(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A store of a kind, to which this process is led; what fails is soon tried again."""
    hubs.hurry(monkeypatch)
    with {**KINDS, **VARIANTS}[kind](folder, monkeypatch) as found:
        yield found


def wait_for(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Until it holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
