"""What the commands that only read a snapshot share: their arguments, errors and exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from data.errors import DataError
from data.printable import printable
from model.device import DeviceError
from model.generate import BrokenModel
from snapshot.errors import SnapshotError
from snapshot.hub.errors import HubError

USER_ERRORS = (SnapshotError, HubError, DataError, DeviceError, BrokenModel)


def exit_code_of(command: Callable[[], None]) -> int:
    """Run a command; an error is a sentence on stderr. The exit code: 2 for a user error."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None if it is closed
        stream.reconfigure(errors="backslashreplace")
    try:
        command()
    except USER_ERRORS as error:
        print(f"error: {printable(str(error), multiline=True)}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, BrokenPipeError):
        _discard_output()
        return 130
    except OSError as error:
        _discard_output()
        what = f"{error.filename or 'the output'}: {error.strerror or error}"
        print(f"error: {printable(what)}", file=sys.stderr)
        return 1 if error.filename is None else 2
    return 0


def _discard_output() -> None:
    """Discard buffered output, or the interpreter would fail to flush it at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def on_terminal() -> bool:
    """Whether stderr is a terminal, where somebody sees progress."""
    return sys.stderr is not None and sys.stderr.isatty()


def whole_number(text: str, least: int, most: int) -> int:
    """An argument between two bounds. Raises ArgumentTypeError, for argparse."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number") from None
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text} is not between {least} and {most}")
    return value


def positive_int(text: str) -> int:
    """An argument that counts something."""
    return whole_number(text, 1, 10**9)
