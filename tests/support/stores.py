"""Stores for the tests: a repo of the Hub, a bucket, an S3 bucket of moto's server, a folder.

Each says what it holds, as somebody else sees it. Those that are servers can fail.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlencode

import pytest
from fsspec.core import url_to_fs
from fsspec.implementations.memory import MemoryFileSystem

import hubs
from loopback_hub import LoopbackHub
from loopback_server import LOOPBACK, Answer, Call, Route, Server
from store.fetch import read_store
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
        whole = [path for path in self.paths() if path.endswith("/manifest.json")]
        return sorted(int(path.split("-")[1]) for path in whole)

    def latest(self) -> Latest | None:
        """`latest.json`, as a start reads it."""
        return read_store(self.open()).latest

    def assert_whole(self) -> None:
        """A folder with a manifest has all files that this lists, and no other."""
        contents = {path: self.read(path) for path in self.paths()}
        hubs.assert_whole(
            {path: (len(one), sha256(one).hexdigest()) for path, one in contents.items()},
            contents.__getitem__,
        )


class Folder(Place):
    """A folder that fsspec can open: of a disk, of this process's memory, or of S3."""

    def __init__(self, url: str) -> None:
        self.url, self.key, self.environment = url, f"hub.url={url}", {}
        self.fs, self.root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
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
        self.environment, self.requests = hub.environment(), hub.requests

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
        self.open().write(path, content)

    def remove(self, path: str) -> None:
        self.bucket.put(path, None)


class S3(Server, Folder):
    """A bucket of moto, which speaks S3, behind a server that can fail.

    The endpoint of a fault is a method, and maybe a part of the address: `PUT manifest`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Server.__init__(self, LOOPBACK, new_port=True)
        from moto.backends import get_backend
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.test import Client

        get_backend("s3").reset()  # all servers of a process have one state
        self._moto = Client(DomainDispatcherApplication(create_backend_app))
        self.up()
        environment = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "of-the-test",
            "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        Folder.__init__(self, "s3://shared/run")
        self.environment = environment

    def find(self, method: str, target: SplitResult) -> tuple[str, Route, dict[str, str]]:
        """Moto answers everything; the endpoint is that of a fault that meets the request."""
        for fault in self._faults:
            of_method, _, part = fault.endpoint.partition(" ")
            if of_method == method and part in target.geturl():
                return fault.endpoint, self._answer, {}
        return method, self._answer, {}

    def _answer(self, call: Call) -> Answer:
        headers = dict(call.headers)
        for name in ("Content-Length", "Transfer-Encoding"):  # of the body as it was sent
            headers.pop(name, None)
        answer = self._moto.open(
            call.path,
            method=call.method,
            query_string=urlencode(call.query, doseq=True),
            headers=headers,
            data=call.body,
        )
        headers = {name: value for name, value in answer.headers if name != "Content-Length"}
        body = bytes(answer.content_length or 0) if call.method == "HEAD" else answer.data
        return Answer(answer.status_code, body, headers)


@contextmanager
def _folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    yield Folder(f"file://{folder}/shared/run")


@contextmanager
def _s3(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    server = S3(monkeypatch)
    try:
        yield server
    finally:
        server.down()
    assert not server.failures, "\n\n".join(server.failures)


@contextmanager
def _of_hub(
    kind: type[HubRepo | HubBucket],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    use_xet: bool = True,
) -> Iterator[Place]:
    with LoopbackHub(new_port=True, use_xet=use_xet) as hub:
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
