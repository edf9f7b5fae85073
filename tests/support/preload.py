"""Processes of this project that start at once: forks of one that has imported everything.

    process = preload.Process([sys.executable, "train.py", ...], env=..., cwd=...)

is subprocess.Popen but for that. What cannot honestly be a fork is a new process: another program,
a terminal, or variables that the imports would have read (see `preload_server`).
"""

from __future__ import annotations

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import preload_server
from preload_server import EXECUTE, ROOM, THEN, can_be_forked, ignored_signals, read_in_imports

POSSIBLE = sys.platform == "linux"
MOST_TEMPLATES = 3
"""How many addresses of a Hub are kept imported."""
SECONDS = 600
"""For a template's answer; imports on a busy machine are the longest."""

_of_torch = {"TORCHINDUCTOR_CACHE_DIR"} - os.environ.keys()
"""Variables that torch sets in the process of the tests when it is used there."""


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, quiet and offline; runs are those of a CPU, whatever there is."""
    ours = {name: value for name, value in os.environ.items() if name not in _of_torch}
    quiet = {"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    return {**ours, **quiet, "CUDA_VISIBLE_DEVICES": "-1", **changes}


class Process(subprocess.Popen):
    """A process, forked where it can be. `forked` tells."""

    def _execute_child(self, *arguments: Any, **named: Any) -> None:
        self.forked = False
        self._seeing = threading.Lock()
        given = EXECUTE.bind(self, *arguments, **named).arguments
        template = _template_for(given) if POSSIBLE else None
        if template is None:
            super()._execute_child(*arguments, **named)  # type: ignore[misc]
            return
        streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        request = {
            "words": [os.fspath(word) for word in given["args"]],
            "environment": dict(os.environ if given["env"] is None else given["env"]),
            "directory": os.fspath(given["cwd"] or Path.cwd()),
            "ignored": ignored_signals(),
            "session": given["start_new_session"],
        }
        self.forked = True
        self._line = template.ask(
            request, [own if fd == -1 else fd for own, fd in enumerate(streams)]
        )
        self.pid = int(_answer(self._line))
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            given["p2cread"],
            given["p2cwrite"],
            given["c2pread"],
            given["c2pwrite"],
            given["errread"],
            given["errwrite"],
        )

    def _internal_poll(self, *arguments: Any, **named: Any) -> int | None:
        if not self.forked:
            return super()._internal_poll(*arguments, **named)  # type: ignore[misc]
        self._see(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if not self.forked:
            return super()._wait(timeout)  # type: ignore[misc]
        if not self._see(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def _see(self, timeout: float | None) -> bool:
        """Whether it ends within so many seconds. Its number is its own until this has told so."""
        try:
            if self.returncode is None and not select.select([self._line], [], [], timeout)[0]:
                return False
        except ValueError:  # another thread has seen it meanwhile
            assert self.returncode is not None
        with self._seeing:
            if self.returncode is None:
                self.returncode = int(_answer(self._line))
                self._line.close()
        return True


class Template:
    """A server of forks, from here."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests

    def ask(self, request: dict[str, Any], fds: list[int]) -> socket.socket:
        """Ask for a fork that has these file descriptors; on what is returned it reports."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            message = json.dumps(request).encode()
            socket.send_fds(self._requests, [message], [there.fileno(), *fds])
        return here

    def further(self, early: dict[str, str]) -> Template:
        """A template that has these variables and has imported the second stage."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            request = {"modules": list(THEN), "environment": early, "session": False}
            with self.ask(request, [there.fileno()]) as line:
                _answer(line)  # its number
                assert _answer(line) == b"ready"
        return Template(here)

    def close(self) -> None:
        """Ask for nothing more. It ends with the last of its forks."""
        self._requests.close()


_first: Template | None = None
_early = read_in_imports(environment())[0]
_by_hub: OrderedDict[str, Template] = OrderedDict()
_starting = threading.Lock()


def _template_for(given: dict[str, Any]) -> Template | None:
    """The template whose fork would be what a new process is; None where there is none."""
    words = given["args"]
    if isinstance(words, (str, bytes)) or given["shell"] or given["preexec_fn"] is not None:
        return None
    special = ("pass_fds", "startupinfo", "gids")
    if any(given[name] for name in special) or given["executable"] not in (None, words[0]):
        return None
    if any(given[name] not in (None, -1) for name in ("gid", "uid", "umask", "process_group")):
        return None
    if not can_be_forked([os.fspath(word) for word in words]):
        return None
    if any(os.isatty(given[name]) for name in ("p2cread", "c2pwrite", "errwrite")):
        return None
    variables = os.environ if given["env"] is None else given["env"]
    if not set(variables.get("CUDA_VISIBLE_DEVICES", "0").split(",")) <= {"-1"}:
        return None  # an import may have begun with the GPU's driver, which does not bear a fork
    early, of_hub = read_in_imports(variables)
    with _starting:
        first = _first_template()
        if early != _early:
            return None
        key = json.dumps(sorted(of_hub.items()))
        if key not in _by_hub:
            _by_hub[key] = first.further({**early, **of_hub})
        _by_hub.move_to_end(key)
        while len(_by_hub) > MOST_TEMPLATES:
            _by_hub.popitem(last=False)[1].close()
        return _by_hub[key]


def _first_template() -> Template:
    global _first
    if _first is None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            process = subprocess.Popen(
                [sys.executable, preload_server.__file__, str(there.fileno()), "x" * (1 << 14)],
                env={**_early, ROOM: "x" * (1 << 14)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                cwd=Path(preload_server.__file__).parent,
            )
        _first = Template(here)
        atexit.register(_end, process)
    return _first


def _end(process: subprocess.Popen) -> None:
    assert _first is not None
    for template in (*_by_hub.values(), _first):
        template.close()
    process.wait()


def _answer(line: socket.socket) -> bytes:
    line.settimeout(SECONDS)
    answer = line.recv(64)
    if not answer:
        raise RuntimeError("the template has ended")
    return answer
