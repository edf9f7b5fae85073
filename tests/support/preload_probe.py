"""A program that tells what it was given, or ends in the way that it is told.

python tests/support/preload_probe.py
    found|exit|says|fails|leaves|dies|interrupted|lingers [argument]
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any


def found() -> dict[str, Any]:
    """All that a process gets from whoever starts it, and from Python."""
    main = sys.modules["__main__"].__dict__
    named = ("__name__", "__file__", "__package__", "__spec__", "__cached__", "__doc__")
    return {
        "words": strings("/proc/self/cmdline"),
        "orig_argv": sys.orig_argv,
        "argv": sys.argv,
        "path": sys.path,
        "main": {name: str(main.get(name)) for name in named},
        "environment": dict(os.environ),
        "shown environment": dict(word.split("=", 1) for word in strings("/proc/self/environ")),
        "directory": str(Path.cwd()),
        "handlers": {str(n): str(signal.getsignal(n)) for n in sorted(signal.valid_signals())},
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "threads": [thread.name for thread in threading.enumerate()],
        "files": files(),
        "streams": [
            (
                *(one.fileno(), one.name, one.mode, one.encoding, one.errors, one.newlines),
                *(one.line_buffering, one.write_through, one.seekable()),
                type(one.buffer).__name__,
            )
            for one in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "own session": os.getsid(0) == os.getpid(),
        "own group": os.getpgid(0) == os.getpid(),
        "parent": strings(f"/proc/{os.getppid()}/cmdline"),
    }


def strings(path: str) -> list[str]:
    """Those that /proc shows, each ended by a zero byte; without room that is left over."""
    return Path(path).read_bytes().decode().rstrip("\0").split("\0")


def files() -> list[str]:
    """What is open, beside the devices that nothing comes from."""
    opened = []
    for one in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # the listing itself is closed by now
            if str(one.readlink()) != os.devnull:
                opened.append(one.name)
    return sorted(opened)


def linger() -> None:
    time.sleep(0.2)
    print("a thread has ended")


if __name__ == "__main__":
    how, argument = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    print("begun")  # is in a buffer, and must not be lost
    match how:
        case "found":
            print(json.dumps(found(), indent=1))
        case "exit":
            sys.exit(int(argument))
        case "says":
            sys.exit(argument)
        case "fails":
            raise ValueError(argument)
        case "leaves":
            sys.stdout.flush()
            os._exit(int(argument))
        case "dies":
            os.kill(os.getpid(), int(argument))
        case "interrupted":
            raise KeyboardInterrupt
        case "lingers":
            atexit.register(print, "the end")
            threading.Thread(target=linger).start()
