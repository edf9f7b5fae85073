"""A Hugging Face Hub on the loopback interface, for the tests; the real client speaks to it.

`HF_ENDPOINT` and `HF_TOKEN` lead the client here; nothing in it is patched. By hand:

    python tests/support/hub/loopback_hub.py [--latency LOW HIGH] [--megabytes-per-second MOST]

Here is the hub as tests hold it. The rest, from the bottom up: loopback_server (connections, faults
and the log), loopback_store (repos and buckets), and what is answered: loopback_repos (users, repos
and refs), loopback_xet and loopback_files.
"""

from __future__ import annotations

import argparse
import hmac
import math
import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import loopback_files  # noqa: F401 - its routes, and those of loopback_repos and loopback_xet
from loopback_server import LOOPBACK, ROUTES, Fault, Refusal, Server
from loopback_store import BUCKETS, MAIN, Bucket, Entry, Repo, sha256_of, small
from loopback_xet import XetStore

TEMPORARY = Path(tempfile.gettempdir())
"""As this process began: a test may fill another."""


@dataclass
class Token:
    """An access token: its owner, and whether it may `write` or only `read`."""

    user: str
    role: str
    is_good: bool = True


class LoopbackHub(Server):
    """The hub, up from `__enter__` to `__exit__`. Every method may be called from any thread.

    `host` is another address of this machine, where clients on other hosts reach it. A hub listens
    where the last one of this process did, unless `new_port`: a client that outlives its test, in a
    thread of this process, would speak to the next test's hub.
    """

    def __init__(self, host: str = LOOPBACK, new_port: bool = False, use_xet: bool = True) -> None:
        super().__init__(host, new_port)
        self.use_xet = use_xet
        """Whether clients use Xet."""
        self.lfs_above = 10 << 20
        """Bytes beyond which a file is a large one; *.safetensors always are."""
        self.xet = XetStore()
        self.uploaded: Counter[str] = Counter()
        """How often each xorb, or content without Xet, was received completely."""
        self._secret = secrets.token_bytes(16)
        self._repos: dict[str, Any] = {}
        self._tokens: dict[str, Token] = {}
        self.default_token = self.add_token("hf_loopbackOfMeMayWrite")

    def __enter__(self) -> LoopbackHub:
        self.up()
        shutil.rmtree(self._clients_cache, ignore_errors=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.down()
        shutil.rmtree(self._clients_cache, ignore_errors=True)
        if error is None:
            assert not self.failures, "\n\n".join(self.failures)

    @property
    def _clients_cache(self) -> Path:
        """Of what is in this hub's Xet storage. Its next hub at this address empties it."""
        return TEMPORARY / f"loopback-hub-{os.getuid()}-{self._port}"

    # How tests set it up.

    def environment(self) -> dict[str, str]:
        """What leads a client here, as the default user, who may write."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_TOKEN": self.default_token,
            "HF_HUB_DISABLE_XET": "0" if self.use_xet else "1",
            "HF_XET_CACHE": str(self._clients_cache),
            "HF_XET_CLIENT_RETRY_BASE_DELAY": "100ms",
            "HF_XET_XORB_COMPRESSION_POLICY": "none",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": f"{self._host},localhost",
        }

    def add_token(self, name: str, role: str = "write") -> str:
        """Another token of the default user, which may write, or only read."""
        self._tokens[name] = Token("me", role)
        return name

    def revoke(self, token: str) -> None:
        """Let a token expire."""
        self._tokens[token].is_good = False

    def restore(self, token: str) -> None:
        """Let an expired token be good again."""
        self._tokens[token].is_good = True

    # What tests read and do.

    def names(self) -> list[str]:
        """The repos and the buckets that there are."""
        return list(self._repos)

    def repo(self, repo_id: str) -> Any:
        """A repo, or a bucket whose id begins so; None where there is none."""
        return self._repos.get(repo_id)

    def create(self, repo_id: str, private: bool = True) -> Repo:
        """Make a repo. Raises Refusal where there is one."""
        return self._add(Repo(repo_id, private))

    def create_bucket(self, bucket_id: str, private: bool = True) -> Bucket:
        """Make a bucket. Raises Refusal where there is one."""
        return self._add(Bucket(BUCKETS + bucket_id, private))

    def _add(self, repo: Any) -> Any:
        if self._repos.setdefault(repo.id, repo) is not repo:
            raise Refusal(409, "You already created this repo")
        return repo

    def delete(self, repo_id: str) -> None:
        """Forget a repo or a bucket."""
        del self._repos[repo_id]

    def commit_files(
        self, repo_id: str, files: Mapping[str, bytes], delete: Iterable[str] = ()
    ) -> str:
        """A commit that no client made; its id. What is deleted is a folder if it ends in /."""
        changes: dict[str, Entry | None] = dict.fromkeys(delete)
        with self.lock:
            repo: Repo = self._repos[repo_id]
            for path, content in files.items():
                if not self.is_large(path, len(content)):
                    changes[path] = small(content)
                    continue
                sha256 = sha256_of(content)
                repo.receive(sha256, content)
                if self.use_xet:
                    self.xet.keep(sha256, content)
                changes[path] = repo.uploaded(path, sha256, None)
            return repo.apply(MAIN, changes)

    # What the answering side needs.

    def fault(self, endpoint: str, kind: str, **details: Any) -> Fault:
        """Script a fault for the requests to an endpoint, * for all, as `Server.fault` does."""
        assert endpoint in {"*", *(route[2] for route in ROUTES)}, endpoint
        return super().fault(endpoint, kind, **details)

    def token(self, authorization: str | None) -> Token | None:
        """The token of a request. Raises Refusal for one that is unknown or expired."""
        if authorization is None:
            return None
        token = self._tokens.get(authorization.removeprefix("Bearer "))
        if token is None or not token.is_good:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return token

    def is_large(self, path: str, size: int) -> bool:
        """Whether a file is not to lie in git itself."""
        return path.endswith(".safetensors") or size > self.lfs_above

    @property
    def contents_endpoint(self) -> str:
        """Its address under another name, where large contents are: another origin, as the Hub's
        storage is. 10.77.1 is 10.77.0.1, which needs no server of names."""
        first, second, third, last = self._host.split(".")
        number = f"{first}.{second}.{256 * int(third) + int(last)}"
        return f"http://{'localhost' if self._host == LOOPBACK else number}:{self._port}"

    def signature(self, method: str, path: str) -> str:
        """What makes an address valid."""
        return hmac.new(self._secret, f"{method} {path}".encode(), "sha256").hexdigest()


def main() -> None:
    """Run a hub in the foreground until it is interrupted."""
    parser = argparse.ArgumentParser(description="A loopback Hugging Face Hub.")
    parser.add_argument(
        "--latency", type=float, nargs=2, default=(0, 0), metavar=("LOW", "HIGH"), help="seconds"
    )
    parser.add_argument("--megabytes-per-second", type=float, default=math.inf)
    arguments = parser.parse_args()
    # A shell that starts it in the background has it ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with LoopbackHub() as hub:
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
