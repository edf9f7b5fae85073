"""What the commands that read a snapshot share: arguments, device and errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch

from data.errors import DataError
from model.cpu import limit_threads
from model.generate import BrokenModel
from snapshot.errors import SnapshotError
from snapshot.named_model import BASE_HELP
from store.errors import StoreError


class DeviceError(ValueError):
    """A device that cannot be used, or that has too little memory. The message is a sentence."""


USER_ERRORS = (SnapshotError, StoreError, DataError, DeviceError, BrokenModel)


def on_terminal() -> bool:
    """Whether stderr is a terminal, where somebody sees progress."""
    return sys.stderr is not None and sys.stderr.isatty()


def bounded(kind: type[int] | type[float], least: float, most: float) -> Callable[[str], float]:
    """The type of an argument for argparse: a number between two bounds."""

    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text} is not {what}") from None
        if not least <= value <= most:  # nan is not
            raise argparse.ArgumentTypeError(f"{text} is not between {least} and {most}")
        return value

    return number


POSITIVE_INT = bounded(int, 1, 10**9)
"""The type of an argument that counts something."""


def model_parser(description: str) -> argparse.ArgumentParser:
    """The arguments of a command that computes with a model: its name, its base and the device."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "model", help="the folder of a run, a snapshot or any model, owner/name[@revision] or a URL"
    )
    parser.add_argument("--base", help=BASE_HELP)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


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
