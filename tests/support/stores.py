"""Stores for the tests: a repo of the Hub, a bucket, an S3 bucket of moto's server, a folder.

Each says what it holds, as somebody else sees it. Those that are servers can fail.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
from snapshot.errors import SnapshotError
from store import kinds
from store.errors import StoreMoved
from store.fetch import read_store
from store.latest import Latest
from store.store import BRANCH, Contents, RemoteFile, Store


class Place:
    """Where a store is. `paths` are all files that are there, `read` has the content of one.

    `put` adds one that no run has uploaded, and `remove` removes one. For one of a server, `fault`
    lets some requests fail from now on; `hits` of the fault counts them.
    """

    url: str
    """Of the store."""
    key: str
    """The configuration key and value that name it."""
    environment: dict[str, str]
    """Of a process that uses it."""

    def open(self, timeout: float = 30.0) -> Store:
        """The store, as a run has it."""
        return kinds.open_store(self.url, timeout)

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


class Shelf(Store):
    """A stranger's store, on a folder: all that a new kind of store needs."""

    server = "the shelf"

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        super().__init__(timeout)
        self.url = self.name = url
        self.key, self.root = f"hub.url={url}", Path(url.removeprefix("shelf://"))

    def head(self, revision: str = BRANCH, known: Contents | None = None) -> Contents:
        places = [place for place in self.root.rglob("*") if place.is_file()]
        files = {
            place.relative_to(self.root).as_posix(): RemoteFile(
                place.stat().st_size, sha256(place.read_bytes()).hexdigest()
            )
            for place in places
        }
        return Contents(self, "", True, files).with_latest()

    def read_small(self, head: Contents, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def fetch(self, head, paths, folder, again=False) -> Path:
        for path in paths if folder else ():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.root / path, folder / path)
        return folder or self.root

    def publish(self, head, add, delete, message) -> Contents:
        if self.head().token != head.token:
            raise StoreMoved(f"{self.name} has moved on", "moved on")
        for path, one in add.items():
            content = one.source if isinstance(one.source, bytes) else one.source.read_bytes()
            if one.sha256 not in (sha256(content).hexdigest(), None):
                raise SnapshotError(f"{one.source} has changed")
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_bytes(content)
        for path in delete:
            (self.root / path).unlink(missing_ok=True)
        return self.head()

    def create(self, private: bool) -> None:
        self.root.mkdir(parents=True, exist_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


FILES = ("a folder", "S3", "a bucket of the Hub")
"""Every kind of store of files that other processes can use."""
KINDS = (*FILES, "another file system", "a store of a stranger", "a repo")
"""All kinds; all tests of stores run with them."""
THOROUGH = {"S3", "a bucket of the Hub"}


def cases(names: Iterable[str]) -> list[Any]:
    """Parameters of a test; two that need a server are thorough."""
    marks = {kind: pytest.mark.thorough if kind in THOROUGH else () for kind in names}
    return [pytest.param(kind, marks=mark) for kind, mark in marks.items()]


@contextmanager
def place(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A store of a kind, to which this process is led; what fails is soon tried again."""
    hubs.hurry(monkeypatch)
    if kind == "a folder":
        yield Folder(f"file://{folder}/shared/run")
    elif kind == "another file system":
        MemoryFileSystem.store.clear()
        yield Folder("memory://shared/run")
    elif kind == "a store of a stranger":
        monkeypatch.setattr(kinds, "KINDS", {"shelf://": Shelf, **kinds.KINDS})
        shelf = Folder(f"file://{folder}/shelf")
        shelf.url, shelf.key = f"shelf://{folder}/shelf", f"hub.url=shelf://{folder}/shelf"
        yield shelf
    elif kind == "S3":
        pytest.importorskip("moto")
        pytest.importorskip("s3fs")
        server = S3(monkeypatch)
        try:
            yield server
        finally:
            server.down()
        assert not server.failures, "\n\n".join(server.failures)
    else:
        with LoopbackHub(new_port=True, use_xet=kind != "a repo without Xet") as hub:
            hubs.lead_here(hub, monkeypatch)
            yield HubBucket(hub) if kind == "a bucket of the Hub" else HubRepo(hub)


def wait_for(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Until it holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
