"""How an attempt ends: the errors that are no accidents, and the numbers that the shell sees."""

from __future__ import annotations

import signal

from data.errors import DataError
from snapshot.errors import SnapshotError
from snapshot.hub_errors import HubError, HubUnreachable
from training.config import ConfigError

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USER_MISTAKE = 2
EXIT_AGAIN = 75
"""Stopped with a snapshot, and to be started again: sysexits.h calls it a temporary failure."""
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

USER_MISTAKES = (ConfigError, DataError, SnapshotError, HubError)
"""A sentence and no traceback."""
OF_SIGNALS = {
    signal.SIGUSR1: EXIT_AGAIN,
    signal.SIGINT: EXIT_INTERRUPTED,
    signal.SIGTERM: EXIT_TERMINATED,
}


def exit_code_of(number: int | None) -> int:
    """The exit code of a run that a signal has ended."""
    return OF_SIGNALS[signal.Signals(number)] if number is not None else EXIT_DONE


class TrainingStopped(Exception):
    """The run cannot go on; the message says why and what is kept."""


def is_lasting(error: Exception) -> bool:
    """Whether the same start would end in the same error: nothing to restart for."""
    return isinstance(error, (*USER_MISTAKES, TrainingStopped)) and not isinstance(
        error, HubUnreachable
    )
