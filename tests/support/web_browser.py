"""A headless Chromium for the tests, driven by the DevTools protocol over two pipes.

    with web_browser.chromium(address) as page:
        page.type("Once")
        page.wait_for("document.title === 'Once'")
        assert page.evaluate("document.images.length") == 0

The protocol: https://chromedevtools.github.io/devtools-protocol/. Messages are JSON and end with a
zero byte; Chromium reads them from its file 3 and writes to its file 4. No port is opened.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
ANSWER_SECONDS = 60
"""How long an answer may take: a browser starts slowly on a busy machine."""
OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # which root cannot have
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # nothing outside is reached
)
ON_FILES_3_AND_4 = 'read=$1 write=$2; shift 2; exec "$@" 3<&"$read" 4>&"$write"'
KEYS = {"Enter": (13, "\r"), "Tab": (9, "")}
"""By name, the code of a key, and the text that it types."""


class Page:
    """The page of a browser. What the browser refuses or JavaScript raises is an AssertionError."""

    def __init__(self, read: int, write: int) -> None:
        self.requested: list[str] = []
        """The address of every request."""
        self.errors: list[str] = []
        """Uncaught exceptions and messages of console.error."""
        self._read, self._write = read, write
        self._numbers = itertools.count(1)
        self._received = bytearray()
        self._answers: dict[int, dict[str, Any]] = {}
        self._session: dict[str, str] = {}
        self._is_loaded = False

    def open(self, url: str) -> None:
        """Load a page, and wait for its load event."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Network", "Runtime"):
            self._call(f"{domain}.enable")
        self._is_loaded = False
        self._call("Page.navigate", url=url)
        self._wait_until(lambda: self._is_loaded, url)

    def evaluate(self, expression: str) -> Any:
        """The value of JavaScript, as JSON has it; a promise is awaited."""
        options = {"awaitPromise": True, "returnByValue": True, "userGesture": True}
        answer = self._call("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in answer, _described(answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 40) -> None:
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < end, f"{expression}: not within {seconds} s; {self.errors}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self._call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press and release a key of `KEYS`."""
        code, text = KEYS[key]
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self._call(
            "Input.dispatchKeyEvent", type="keyDown", **event, **{"text": text} if text else {}
        )
        self._call("Input.dispatchKeyEvent", type="keyUp", **event)

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": arguments, **self._session}
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self._write, content) :]
        self._wait_until(lambda: number in self._answers, method)
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']['message']}"
        return answer["result"]

    def _wait_until(self, happened: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + ANSWER_SECONDS
        while not happened():
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            received = os.read(self._read, 1 << 20) if ready else b""
            assert received, f"{what}: the browser has ended, or is silent"
            *messages, self._received = (self._received + received).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers[message["id"]] = message
                else:
                    self._note(message["method"], message["params"])

    def _note(self, method: str, event: dict[str, Any]) -> None:
        match method:
            case "Network.requestWillBeSent":
                self.requested.append(event["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(_described(event["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if event["type"] == "error":
                self.errors.append(" ".join(str(one.get("value")) for one in event["args"]))
            case "Page.loadEventFired":
                self._is_loaded = True


def _described(raised: dict[str, Any]) -> str:
    return raised.get("exception", {}).get("description") or raised["text"]


@contextlib.contextmanager
def chromium(address: str) -> Iterator[Page]:
    """A page in a headless Chromium with a profile of its own; both are gone afterwards.

    The test is skipped if there is no Chromium.
    """
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        its_read, write = os.pipe()
        read, its_write = os.pipe()
        command = [program, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            ["bash", "-c", ON_FILES_3_AND_4, "bash", str(its_read), str(its_write), *command],
            pass_fds=(its_read, its_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(its_read)
        os.close(its_write)
        try:
            page = Page(read, write)
            page.open(address)
            yield page
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(read)
            os.close(write)
