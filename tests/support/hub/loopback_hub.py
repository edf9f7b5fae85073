"""A Hugging Face Hub on the loopback interface, for the tests; the real client speaks to it.

`HF_ENDPOINT` and `HF_TOKEN` lead the client here; nothing in it is patched. By hand:

    python tests/support/hub/loopback_hub.py FOLDER [--latency LOW HIGH]
        [--megabytes-per-second MOST]

Here is the hub as tests hold it. The rest, from the bottom up: loopback_server (connections, faults
and the log), loopback_store (repos, buckets and contents), and what is answered: loopback_repos,
loopback_xet, loopback_files and loopback_buckets.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import math
import secrets
import signal
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import loopback_buckets  # noqa: F401 - its routes, and those of loopback_repos and loopback_xet
import loopback_files  # noqa: F401
from loopback_server import LOOPBACK, ROUTES, Fault, Refusal, Server
from loopback_store import (
    BUCKETS,
    MAIN,
    Add,
    AddLarge,
    Bucket,
    Delete,
    Operation,
    Repo,
)
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


class LoopbackHub(Server):
    """The hub, up from `__enter__` to `__exit__`. Every method may be called from any thread.

    `host` is another address of this machine, where clients on other hosts reach it. A hub listens
    where the last one of this process did, unless `new_port`: a client that outlives its test, in a
    thread of this process, would speak to the next test's hub.
    """

    def __init__(
        self,
        folder: Path,
        host: str = LOOPBACK,
        new_port: bool = False,
        use_xet: bool = True,
    ) -> None:
        super().__init__(host, new_port)
        self.use_xet = use_xet
        """Whether clients use Xet."""
        self.page_size = 1000
        """Lines of a listing in one answer."""
        self.lfs_above = 10 << 20
        """Bytes beyond which a file is a large one; *.safetensors always are."""
        self.xet_token_seconds = 3600.0
        """How long a token for Xet is good."""
        self.xet = XetStore(folder / "xorbs")
        self._folder, self._secret = folder, secrets.token_bytes(16)
        self._lock = threading.RLock()
        self._created = 0
        self._repos: dict[str, Repo | Bucket] = {}
        self._tokens: dict[str, Token] = {}
        self._uploaded: Counter[str] = Counter()
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
        self.release()
        if error is None:
            assert not self._failures, "\n\n".join(self._failures)

    # How tests set it up.

    def environment(self) -> dict[str, str]:
        """What leads a client here, as the default user, who may write."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_TOKEN": self.default_token,
            "HF_HUB_DISABLE_XET": "0" if self.use_xet else "1",
            # Of this hub alone: what another one has need not be here, at the same address.
            "HF_XET_CACHE": str(self._folder / "client's xet"),
            "HF_XET_CLIENT_RETRY_BASE_DELAY": "100ms",
            "HF_XET_XORB_COMPRESSION_POLICY": "none",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": f"{self._host},localhost",
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

    # What tests read and do.

    def names(self) -> list[str]:
        """The repos and the buckets that there are."""
        with self._lock:
            return list(self._repos)

    def repo(self, repo_id: str) -> Repo | Bucket | None:
        """A repo, or a bucket whose id begins so; None where there is none."""
        with self._lock:
            return self._repos.get(repo_id)

    def create(self, repo_id: str, private: bool = True) -> Repo:
        """Make a repo. Raises Refusal where there is one."""
        repo = Repo(repo_id, self._new_folder(repo_id), private)
        self._repos[repo_id] = repo
        self.notify()
        return repo

    def create_bucket(self, bucket_id: str, private: bool = True) -> Bucket:
        """Make a bucket. Raises Refusal where there is one."""
        bucket_id = BUCKETS + bucket_id
        bucket = Bucket(bucket_id, self._new_folder(bucket_id), private)
        self._repos[bucket_id] = bucket
        self.notify()
        return bucket

    def _new_folder(self, repo_id: str) -> Path:
        with self._lock:
            if repo_id in self._repos:
                raise Refusal(409, "You already created this repo")
            self._created += 1  # so that a deleted repo's contents do not come back
            return self._folder / f"{repo_id}-{self._created}"

    def delete(self, repo_id: str) -> None:
        """Forget a repo or a bucket."""
        with self._lock:
            del self._repos[repo_id]
        self.notify()

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
        assert isinstance(repo, Repo)
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
        self.notify()
        return commit.id

    @property
    def uploaded(self) -> Counter[str]:
        """How often each large content was received completely, by SHA-256."""
        with self._lock:
            return Counter(self._uploaded)

    # What the answering side needs.

    def fault(self, endpoint: str, kind: str, **details: Any) -> Fault:
        """Script a fault for the requests to an endpoint, * for all, as `Server.fault` does."""
        assert endpoint in {"*", *(route[2] for route in ROUTES)}, endpoint
        return super().fault(endpoint, kind, **details)

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

    def signed(self, method: str, path: str) -> str:
        """An address of a large content, which needs no token."""
        return f"{self.contents_endpoint}{path}?signature={self.signature(method, path)}"

    def signature(self, method: str, path: str) -> str:
        """What makes an address valid."""
        return hmac.new(self._secret, f"{method} {path}".encode(), "sha256").hexdigest()

    def received(self, sha256: str) -> None:
        """Count a large content that has come in."""
        with self._lock:
            self._uploaded[sha256] += 1


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
        for name in ("HF_ENDPOINT", "HF_TOKEN", "HF_XET_XORB_COMPRESSION_POLICY"):
            print(f"{name}={hub.environment()[name]}", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    main()
