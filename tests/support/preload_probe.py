"""A program that tells what it was given, and ends in the way that it is told.

python tests/support/preload_probe.py exit|dies NUMBER ...
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any


def found() -> dict[str, Any]:
    """What a process gets from whoever starts it, and from Python."""
    return {
        "words": strings("/proc/self/cmdline"),
        "orig_argv": sys.orig_argv,
        "argv": sys.argv,
        "path": sys.path,
        "name": __name__,
        "file": __file__,
        "environment": dict(os.environ),
        "shown environment": dict(word.split("=", 1) for word in strings("/proc/self/environ")),
        "directory": str(Path.cwd()),
        "handlers": {str(n): str(signal.getsignal(n)) for n in sorted(signal.valid_signals())},
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "threads": [thread.name for thread in threading.enumerate()],
        "streams": [
            (one.fileno(), one.encoding, one.errors, one.line_buffering, one.seekable())
            for one in (sys.stdout, sys.stderr)
        ],
        "own session": os.getsid(0) == os.getpid(),
    }


def strings(path: str) -> list[str]:
    """Those that /proc shows, each ended by a zero byte; without room that is left over."""
    return Path(path).read_bytes().decode().rstrip("\0").split("\0")


if __name__ == "__main__":
    parent = strings(f"/proc/{os.getppid()}/cmdline")
    print(json.dumps({**found(), "parent": parent}), flush=sys.argv[1] == "dies")
    if sys.argv[1] == "dies":
        os.kill(os.getpid(), int(sys.argv[2]))
    sys.exit(int(sys.argv[2]))
