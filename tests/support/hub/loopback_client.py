"""The real Hub client in a process of its own, which does what a test says in Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loopback_hub import LoopbackHub

SETTINGS = {"latency", "multipart_above", "part_bytes", "page_size", "lfs_above"}


class Failed(Exception):
    """What the client raised."""

    def __init__(self, kinds: list[str], status: int | None, message: str) -> None:
        super().__init__(f"{kinds[0]}: {message}")
        self.kinds, self.status = kinds, status
        """Names of the error's type and its bases; status of the answer, if it came to one."""


class Client:
    """A process with the client in it: `api` (an HfApi), `Add` and `Delete` (for commits), and
    `http` and `token` (the headers) for what the client itself would not send."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1", **environment},
        )

    def begin(self, expression: str, **names: Any) -> None:
        """Let the client evaluate an expression, in which names stand for JSON values."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([expression, names]) + "\n")
        self._process.stdin.flush()

    def end(self) -> Any:
        """The value of what was begun, as JSON has it. Raises Failed."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the client has died"
        answer = json.loads(line)
        if "value" in answer:
            return answer["value"]
        raise Failed(answer["kinds"], answer["status"], answer["message"])

    def __call__(self, expression: str, **names: Any) -> Any:
        """The value of an expression. Raises Failed."""
        self.begin(expression, **names)
        return self.end()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def refused(client: Client, expression: str, **names: Any) -> Failed:
    """What the client raises."""
    try:
        value = client(expression, **names)
    except Failed as error:
        return error
    raise AssertionError(f"{expression} gave {value}")


@contextmanager
def hub_with_client(folder: Path) -> Iterator[tuple[LoopbackHub, Client]]:
    """A hub and a client for all tests of a file: a client takes a second to start.

    Large files go by LFS. What goes through Xet: test_xet.
    """
    with LoopbackHub(folder / "hub", use_xet=False) as hub:
        client = Client({**hub.environment(), "HF_HOME": str(folder / "home")})
        try:
            yield hub, client
        finally:
            client.close()
        assert [one.path for one in hub.requests if one.endpoint == "unknown"] == []


@contextmanager
def left_as_found(hub: LoopbackHub) -> Iterator[LoopbackHub]:
    """The hub for one test; afterwards it is up, without faults, and set as before."""
    before = {name: value for name, value in vars(hub).items() if name in SETTINGS}
    try:
        yield hub
    finally:
        hub.clear_faults()
        hub.up()
        vars(hub).update(before)


def serve() -> None:
    """The process's side: a line with an expression in, a line with its value out."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.utils import get_session, logging

    logging.set_verbosity_error()
    answers, sys.stdout = sys.stdout, sys.stderr
    api = HfApi()
    known: dict[str, Any] = {
        "api": api,
        "Add": CommitOperationAdd,
        "Delete": CommitOperationDelete,
        "Path": Path,
        "ThreadPoolExecutor": ThreadPoolExecutor,
        "http": get_session(),
        "token": api._build_hf_headers(),
    }
    for line in sys.stdin:
        expression, names = json.loads(line)
        try:
            answer = json.dumps({"value": eval(expression, {**known, **names})})
        except Exception as error:
            traceback.print_exc()
            answer = json.dumps(
                {
                    "kinds": [kind.__name__ for kind in type(error).__mro__],
                    "status": getattr(getattr(error, "response", None), "status_code", None),
                    "message": str(error),
                }
            )
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    serve()
