"""Processes of this project that start at once: forks of one that has imported everything.

    process = preload.Process([sys.executable, "train.py", ...], env=..., cwd=...)

is subprocess.Popen but for that. What cannot honestly be a fork is a new process: another program,
or variables that the imports would have read (see `preload_server`).
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
from preload_server import EXECUTE, ROOM, can_be_forked, read_in_imports

POSSIBLE = sys.platform == "linux"
OF_THE_HUB = "HF_"
"""How the names begin of variables with which a loopback Hub leads its clients."""
MOST_SERVERS = 3
"""How many are kept, each with other variables of the Hub."""
SECONDS = 600
"""For a server's answer; imports on a busy machine are the longest."""

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
        self.forked, self._seeing = False, threading.Lock()
        given = EXECUTE.bind(self, *arguments, **named).arguments
        words = [os.fspath(word) for word in given["args"]]
        variables = dict(os.environ if given["env"] is None else given["env"])
        server = _server_for(words, variables)
        if server is None:
            super()._execute_child(*arguments, **named)  # type: ignore[misc]
            return
        request = {
            "words": words,
            "environment": variables,
            "directory": os.fspath(given["cwd"] or Path.cwd()),
            "session": given["start_new_session"],
        }
        given_streams = (given[name] for name in ("p2cread", "c2pwrite", "errwrite"))
        streams = [own if fd == -1 else fd for own, fd in enumerate(given_streams)]
        self.forked = True
        self._line, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            socket.send_fds(server, [json.dumps(request).encode()], [there.fileno(), *streams])
        self.pid = int(_answer(self._line))
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]

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


_servers: OrderedDict[str, socket.socket] = OrderedDict()
"""To servers, by the variables that they have; the one used last is the last."""
_starting = threading.Lock()


def _server_for(words: list[str], variables: dict[str, str]) -> socket.socket | None:
    """To the server whose fork would be what a new process is; None where there is none."""
    if not POSSIBLE or not can_be_forked(words):
        return None
    if variables.get("CUDA_VISIBLE_DEVICES") != "-1":
        return None  # an import may have begun with the GPU's driver, which does not bear a fork
    early, usual = read_in_imports(variables), read_in_imports(environment())
    if any(not name.startswith(OF_THE_HUB) for name, _ in early.items() ^ usual.items()):
        return None
    key = json.dumps(sorted(early.items()))
    with _starting:
        if key not in _servers:
            _servers[key] = _new_server(early)
        _servers.move_to_end(key)
        if len(_servers) > MOST_SERVERS:
            _servers.popitem(last=False)[1].close()
        return _servers[key]


def _new_server(variables: dict[str, str]) -> socket.socket:
    """Start a server. It ends when this process does, or when nobody can ask it any more."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    room = "x" * (1 << 14)
    process = subprocess.Popen(
        [sys.executable, preload_server.__file__, str(there.fileno()), room],
        env={**variables, ROOM: room},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[there.fileno()],
        cwd=Path(preload_server.__file__).parent,
    )
    there.close()
    atexit.register(process.wait)
    atexit.register(here.close)  # first
    return here


def _answer(line: socket.socket) -> bytes:
    line.settimeout(SECONDS)
    if not (answer := line.recv(64)):
        raise RuntimeError("the server has ended")
    return answer
