"""What the commands that only read a snapshot share: their arguments, errors and exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import data.command
from data.command import EXIT_USER_MISTAKE, say_error
from data.errors import DataError
from model.generate import BrokenModel
from snapshot.device import DeviceError
from snapshot.errors import SnapshotError
from store.errors import HubError

USER_ERRORS = (SnapshotError, HubError, DataError, DeviceError, BrokenModel)


def exit_code_of(command: Callable[[], None]) -> int:
    """Run a command; an error is a sentence on stderr. The exit code: 2 for a user error."""

    def code() -> int:
        try:
            command()
        except USER_ERRORS as error:
            say_error(str(error))
            return EXIT_USER_MISTAKE
        return 0

    return data.command.exit_code_of(code)


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
