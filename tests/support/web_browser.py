"""A headless Chromium for the tests, driven by the DevTools protocol over two pipes.

    with web_browser.chromium() as chromium:
        page = chromium.open(address)
        page.press("Tab")
        page.type("Once")
        page.wait_for("document.title === 'Once'")
        assert page.evaluate("document.images.length") == 0
        assert all(url.startswith(address) for url in page.requested)

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
from collections.abc import Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
INSTALL = "apt-get install chromium"
ANSWER_SECONDS = 60
"""How long an answer may take: a browser starts slowly on a busy machine."""
WAIT_SECONDS = 40
"""How long a page may take for what is waited for; less, so that the page itself answers."""
OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # which root cannot have
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # nothing outside is reached
)
ON_FILES_3_AND_4 = 'read=$1 write=$2; shift 2; exec "$@" 3<&"$read" 4>&"$write"'
KEYS = {"Enter": (13, "\r"), "Tab": (9, "")}
"""By name, the code of a key, and the text that it types."""


class BrowserError(AssertionError):
    """The browser refused a command, or JavaScript in the page raised."""


class Browser:
    """A running Chromium. It is used by one thread, and by one page at a time."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._numbers = itertools.count(1)
        self._received = bytearray()
        self._answers: dict[int, dict[str, Any]] = {}
        self._pages: dict[str, Page] = {}

    def open(self, url: str) -> Page:
        """A new page, once its load event has been."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        page = Page(self, attached["sessionId"])
        self.follow(page, page.session)
        page.go_to(url)
        return page

    def follow(self, page: Page, session: str) -> None:
        """Have the requests and errors of a page, or of a worker of it, recorded in the page."""
        self._pages[session] = page
        attach = {"autoAttach": True, "waitForDebuggerOnStart": True, "flatten": True}
        self.send("Target.setAutoAttach", attach, session)
        for domain in ("Page", "Network", "Runtime"):
            self.send(f"{domain}.enable", {}, session)  # a worker has no Page, and says so
        self.send("Runtime.runIfWaitingForDebugger", {}, session)

    def send(self, method: str, arguments: dict[str, Any], session: str | None = None) -> int:
        """Send a command, and do not wait for its answer; the command's number."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": arguments}
        message |= {} if session is None else {"sessionId": session}
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self._write, content) :]
        return number

    def call(
        self, method: str, arguments: dict[str, Any], session: str | None = None
    ) -> dict[str, Any]:
        """Send a command and return its result. Raises BrowserError if it is refused."""
        number = self.send(method, arguments, session)
        self.wait_until(lambda: number in self._answers, method)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def wait_until(self, happened: Any, what: str, seconds: float = ANSWER_SECONDS) -> None:
        """Receive messages until `happened()`. Raises BrowserError after so many seconds."""
        end = time.monotonic() + seconds
        while not happened():
            if not select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0]:
                raise BrowserError(f"{what}: nothing after {seconds} s")
            received = os.read(self._read, 1 << 20)
            if not received:
                raise BrowserError(f"{what}: the browser has ended")
            self._received += received
            *messages, rest = self._received.split(b"\0")
            self._received = rest
            for message in messages:
                self._take(json.loads(message))

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers[message["id"]] = message
        elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
            page.take(message["method"], message["params"])


class Page:
    """A page in the browser, with what it and its workers have requested."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.session = session
        self.requested: list[str] = []
        """The address of every request, those of workers as well."""
        self.errors: list[str] = []
        """Uncaught exceptions and messages of console.error."""
        self._browser = browser
        self._loaded = 0

    def go_to(self, url: str) -> None:
        """Load another page here, and wait for its load event."""
        before = self._loaded
        self._call("Page.navigate", {"url": url})
        self._browser.wait_until(lambda: self._loaded > before, url)

    def evaluate(self, expression: str) -> Any:
        """The value of JavaScript, as JSON has it; a promise is awaited.

        Raises BrowserError with the stack if it raises.
        """
        options = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        answer = self._call("Runtime.evaluate", {**options, "userGesture": True})
        if (raised := answer.get("exceptionDetails")) is not None:
            raise BrowserError(_described(raised))
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = WAIT_SECONDS) -> None:
        """Wait until a JavaScript expression is true. Raises BrowserError after so many seconds."""
        milliseconds = int(seconds * 1000)
        found = self.evaluate(
            "new Promise((resolve) => { const end = Date.now() + "
            f"{milliseconds}; const look = () => ({expression}) ? resolve(true) : "
            "Date.now() > end ? resolve(false) : setTimeout(look, 5); look(); })"
        )
        if not found:
            raise BrowserError(f"{expression}: not true after {seconds} s; {self.errors}")

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self._call("Input.insertText", {"text": text})

    def press(self, key: str) -> None:
        """Press and release a key of `KEYS`."""
        code, text = KEYS[key]
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        typed = {"text": text} if text else {}
        self._call("Input.dispatchKeyEvent", {"type": "keyDown", **event, **typed})
        self._call("Input.dispatchKeyEvent", {"type": "keyUp", **event})

    def take(self, method: str, event: dict[str, Any]) -> None:
        """Record an event of this page or of a worker of it."""
        if method == "Target.attachedToTarget":
            self._browser.follow(self, event["sessionId"])
        elif method == "Network.requestWillBeSent":
            self.requested.append(event["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(_described(event["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and event["type"] == "error":
            self.errors.append(" ".join(str(one.get("value")) for one in event["args"]))
        elif method == "Page.loadEventFired":
            self._loaded += 1

    def _call(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return self._browser.call(method, arguments, self.session)


def _described(raised: dict[str, Any]) -> str:
    return raised.get("exception", {}).get("description") or raised["text"]


def find_program() -> str:
    """The path of Chromium; the test is skipped if there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"needs Chromium: {INSTALL}")
    return found


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium with a profile of its own; the test is skipped if there is none.

    It and its profile are gone afterwards.
    """
    program = find_program()
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
            yield Browser(read, write)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(read)
            os.close(write)
