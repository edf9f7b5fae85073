"""A Hugging Face Hub on the loopback interface, for the tests; the real client speaks to it.

`HF_ENDPOINT` and `HF_TOKEN` lead the client here; nothing in it is patched. By hand:

    python tests/support/hub/loopback_hub.py FOLDER [--latency LOW HIGH]
        [--megabytes-per-second MOST]

Here is the hub as tests hold it. The rest, from the bottom up: loopback_contents (files),
loopback_store (repos), loopback_messages (requests and answers), loopback_log, loopback_faults
(which fault is due), loopback_deviations (what other servers lack), loopback_routes,
loopback_repos, loopback_files, loopback_xet and loopback_buckets (what is answered), and
loopback_http (connections, and how faults end them).
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import math
import random
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import loopback_buckets
import loopback_files
import loopback_repos
import loopback_xet
from loopback_buckets import Bucket
from loopback_contents import Refusal
from loopback_deviations import Deviations
from loopback_faults import Fault, Faults
from loopback_http import Doors
from loopback_log import Log
from loopback_messages import Request
from loopback_routes import HUB, Found, unknown
from loopback_store import MAIN, Add, AddLarge, Delete, Operation, Repo
from loopback_xet import XetStore

OWNER = "me"
OTHER = "somebody-else"


@dataclass
class Token:
    """An access token."""

    name: str
    user: str
    role: str
    is_good: bool = True


class LoopbackHub:
    """The hub, up from `__enter__` to `__exit__`. Every method may be called from any thread.

    `host` is another address of this machine, where clients on other hosts reach it. A hub listens
    where the last one of this process did, unless `new_port`: a client that outlives its test, in a
    thread of this process, would speak to the next test's hub.
    """

    def __init__(
        self,
        folder: Path,
        host: str = "127.0.0.1",
        deviations: Deviations | None = None,
        new_port: bool = False,
        use_xet: bool = True,
    ) -> None:
        self.use_xet = use_xet
        """Whether clients use Xet."""
        self.deviations = deviations or Deviations()
        self.latency = (0.0, 0.0)
        """Seconds added to each request, from and to."""
        self.bytes_per_second = math.inf
        """What all connections carry together, bodies of requests and of answers."""
        self._free_at = 0.0
        """When they have carried what they took, by time.monotonic()."""
        self.page_size = 1000
        """Lines of a listing in one answer."""
        self.lfs_above = 10 << 20
        """Bytes beyond which a file is a large one; *.safetensors always are."""
        self.xet_token_seconds = 3600.0
        """How long a token for Xet is good."""
        self.xet = XetStore(folder / "xorbs")
        self.faults = Faults()
        self._folder, self._host = folder, host
        self._secret = secrets.token_bytes(16)
        self._random = random.Random(0)
        self._log = Log()
        self._lock = threading.RLock()
        self._failures: list[str] = []
        self._created = 0
        self._repos: dict[str, Repo] = {}
        self._buckets: dict[str, Bucket] = {}
        self._tokens: dict[str, Token] = {}
        self.doors = Doors(self, self._find, host, new_port)
        self.default_token = self.add_token("hf_loopbackOfMeMayWrite")

    def __enter__(self) -> LoopbackHub:
        self.up()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.down()
        self.doors.release()
        if error is None:
            assert not self._failures, "\n\n".join(self._failures)

    # How tests set it up.

    @property
    def endpoint(self) -> str:
        """The address of the hub, without a slash at the end."""
        return self.doors.address(HUB)

    def environment(self) -> dict[str, str]:
        """What leads a client here, as the default user, who may write."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_TOKEN": self.default_token,
            "HF_HUB_DISABLE_XET": "0" if self.use_xet else "1",
            # Of this hub alone: what another one has need not be here, at the same address.
            "HF_XET_CACHE": str(self._folder / "client's xet"),
            "HF_XET_CLIENT_RETRY_BASE_DELAY": "100ms",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": self._host,
        }

    def add_token(self, name: str, user: str = OWNER, role: str = "write") -> str:
        """A token that may write, read, or (fineGrained) what its scopes say, which is to write."""
        if role not in ("write", "read", "fineGrained"):
            raise ValueError(f"role={role!r} is none of write, read, fineGrained")
        with self._lock:
            self._tokens[name] = Token(name, user, role)
        return name

    def revoke(self, token: str) -> None:
        """Let a token expire."""
        with self._lock:
            self._tokens[token].is_good = False

    def restore(self, token: str) -> None:
        """Let an expired token be good again."""
        with self._lock:
            self._tokens[token].is_good = True

    def fault(
        self, endpoint: str, kind: str, *, after: int = 0, times: int | None = 1, **details: Any
    ) -> Fault:
        """Script a fault (see loopback_faults.KINDS) for the requests to an endpoint, * for all.

        From now on, `after` of them pass; the next `times` are hit, with None all until
        `clear_faults`.
        """
        fault = Fault(endpoint, kind, after, times, **details)
        self.faults.add(fault)
        return fault

    def clear_faults(self) -> None:
        """Forget all faults."""
        self.faults.clear()

    def up(self) -> None:
        """Listen, after `down` at the same addresses."""
        self.doors.open()

    def down(self) -> None:
        """Refuse all connections. Afterwards no request is under way, and none is applied.

        Those under way may end first, for a while; what hangs is cut at once.
        """
        self.doors.close()

    # What tests read and do.

    def names(self) -> list[str]:
        """The repos and the buckets that there are."""
        with self._lock:
            return [*self._repos, *self._buckets]

    def repo(self, repo_id: str) -> Repo | None:
        """A repo; None where there is none."""
        with self._lock:
            return self._repos.get(repo_id)

    def create(self, repo_id: str, private: bool = True) -> Repo:
        """Make a repo. Raises Refusal where there is one."""
        with self._lock:
            if repo_id in self._repos:
                raise Refusal(409, "You already created this model repo")
            self._created += 1  # so that a deleted repo's contents do not come back
            folder = self._folder / f"{repo_id}-{self._created}"
            repo = Repo(repo_id, folder, private, self.deviations.long_ids)
            self._repos[repo_id] = repo
        self._log.notify()
        return repo

    def bucket(self, bucket_id: str) -> Bucket | None:
        """A bucket; None where there is none."""
        with self._lock:
            return self._buckets.get(bucket_id)

    def create_bucket(self, bucket_id: str, private: bool = True) -> Bucket:
        """Make a bucket. Raises Refusal where there is one."""
        with self._lock:
            if bucket_id in self._buckets:
                raise Refusal(409, "You already created this bucket")
            bucket = Bucket(bucket_id, self._folder / "buckets" / bucket_id, private)
            self._buckets[bucket_id] = bucket
        self._log.notify()
        return bucket

    def delete_bucket(self, bucket_id: str) -> None:
        """Forget a bucket."""
        with self._lock:
            del self._buckets[bucket_id]
        self._log.notify()

    def delete(self, repo_id: str) -> None:
        """Forget a repo."""
        with self._lock:
            del self._repos[repo_id]
        self._log.notify()

    def commit_files(
        self,
        repo_id: str,
        files: Mapping[str, bytes],
        delete: Iterable[str] = (),
        *,
        branch: str = MAIN,
        title: str = "Commit by somebody else",
    ) -> str:
        """A commit that no client made; its id. What is deleted is a folder if it ends in /."""
        repo = self._repos[repo_id]
        operations: list[Operation] = [Delete(path, path.endswith("/")) for path in delete]
        for path, content in files.items():
            if self.is_large(path, len(content)):
                sha256 = hashlib.sha256(content).hexdigest()
                repo.contents.receive(sha256, [content])
                if self.use_xet:
                    self.xet.keep(sha256, content)
                operations.append(AddLarge(path, sha256))
            else:
                operations.append(Add(path, content))
        commit = repo.apply(branch, operations, title, author=OTHER)
        self._log.notify()
        return commit.id

    @property
    def requests(self) -> list[Request]:
        """What was asked, in the order of the answers."""
        return self._log.requests()

    @property
    def uploaded(self) -> Counter[str]:
        """How often each large content was received completely, by SHA-256."""
        return self._log.uploaded()

    def count(self, endpoint: str) -> int:
        """How many requests to an endpoint succeeded."""
        return sum(
            one.endpoint == endpoint and isinstance(one.status, int) and one.status < 400
            for one in self.requests
        )

    def wait_for(self, predicate: Callable[[], Any], deadline: float = 300.0) -> Any:
        """The first true value of a predicate, looked at after every request and every commit.

        Raises AssertionError after so many seconds.
        """
        return self._log.wait_for(predicate, deadline)

    # What the answering side needs.

    def token(self, authorization: str | None) -> Token | None:
        """The token of a request. Raises Refusal for one that is unknown or expired."""
        if authorization is None:
            return None
        with self._lock:
            token = self._tokens.get(authorization.removeprefix("Bearer "))
        if token is None or not token.is_good:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return token

    def is_large(self, path: str, size: int) -> bool:
        """Whether a file is not to lie in git itself."""
        return path.endswith(".safetensors") or size > self.lfs_above

    def signed(self, origin: str, method: str, path: str) -> str:
        """An address that needs no token."""
        return f"{self.doors.address(origin)}{path}?signature={self.signature(method, path)}"

    def signature(self, method: str, path: str) -> str:
        """What makes an address valid."""
        return hmac.new(self._secret, f"{method} {path}".encode(), "sha256").hexdigest()

    def arrived(self, endpoint: str, method: str, path: str, token: str | None) -> Request:
        """The line of the log that a request begins."""
        return self._log.begin(endpoint, method, path, token)

    def delay(self) -> None:
        """Wait as long as the network would take."""
        low, high = self.latency
        if high > 0:
            with self._lock:
                seconds = self._random.uniform(low, high)
            self.doors.closing.wait(seconds)

    def carry(self, size: int) -> None:
        """Wait as long as so many bytes take."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size / self.bytes_per_second
            seconds = self._free_at - time.monotonic()
        if seconds > 0:
            self.doors.closing.wait(seconds)

    def log(self, request: Request) -> None:
        """Put a request into the log."""
        self._log.add(request)

    def received(self, sha256: str) -> None:
        """Count a large content that has come in."""
        self._log.received(sha256)

    def failed(self, failure: str) -> None:
        """Note that this hub itself does not work; it is raised at the end."""
        with self._lock:
            self._failures.append(failure)

    def _find(self, origin: str, method: str, path: str) -> Found:
        rooms = (loopback_repos, loopback_files, loopback_xet, loopback_buckets)
        for routes in (room.ROUTES for room in rooms):
            found = routes.find(origin, method, path)
            if found and not self.deviations.without(found[0]):
                return found
        return "unknown", unknown, {}


def main() -> None:
    """Run a hub in the foreground until it is interrupted."""
    parser = argparse.ArgumentParser(description="A loopback Hugging Face Hub.")
    parser.add_argument("folder", type=Path, help="where the contents go")
    parser.add_argument(
        "--latency", type=float, nargs=2, default=(0, 0), metavar=("LOW", "HIGH"), help="seconds"
    )
    parser.add_argument("--megabytes-per-second", type=float, default=math.inf)
    arguments = parser.parse_args()
    # A shell that starts it in the background has it ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with LoopbackHub(arguments.folder) as hub:
        hub.latency = tuple(arguments.latency)
        hub.bytes_per_second = 1e6 * arguments.megabytes_per_second
        for name in ("HF_ENDPOINT", "HF_TOKEN"):
            print(f"{name}={hub.environment()[name]}", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    main()
