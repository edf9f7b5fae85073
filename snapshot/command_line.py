"""What the commands that read a snapshot share: arguments, device, errors and exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch

import data.command
from data.command import EXIT_USER_MISTAKE, say_error
from data.errors import DataError
from model.cpu import limit_threads
from model.generate import BrokenModel
from snapshot.errors import SnapshotError
from store.errors import StoreError


class DeviceError(ValueError):
    """A device that cannot be used, or that has too little memory. The message is a sentence."""


USER_ERRORS = (SnapshotError, StoreError, DataError, DeviceError, BrokenModel)


def exit_code_of(command: Callable[[], int | None]) -> int:
    """Run a command; an error is a sentence on stderr. The exit code: 2 for a user error."""

    def code() -> int:
        try:
            return command() or 0
        except USER_ERRORS as error:
            say_error(str(error))
            return EXIT_USER_MISTAKE

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


def default_device() -> str:
    """The name of the first GPU, or of the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def usable_device(name: str) -> torch.device:
    """The device of this name, where a CPU computes with no more threads than it has cores.

    Raises DeviceError if it cannot hold a tensor.
    """
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(f"--device {name} cannot be used here: {reason}") from error
    if device.type == "cpu":
        limit_threads()
    return device
