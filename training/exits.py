"""How an attempt ends: the errors that are no accidents, and the numbers that the shell sees."""

from __future__ import annotations

import signal

from config.schema import ConfigError
from data.errors import DataError, TextLost, TextUnreachable
from snapshot.errors import SnapshotError
from snapshot.hub.errors import HubError, HubUnreachable
from training.run.signals import LAUNCHER_GONE, TIME_IS_OVER, WORKER_GONE

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USER_MISTAKE = 2
EXIT_AGAIN = 75
"""Stopped with a snapshot, and to be started again: sysexits.h calls it a temporary failure."""
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

USER_MISTAKES = (ConfigError, DataError, SnapshotError, HubError)
"""A sentence and no traceback."""
OF_CAUSES = {
    signal.SIGUSR1: EXIT_AGAIN,
    signal.SIGINT: EXIT_INTERRUPTED,
    signal.SIGTERM: EXIT_TERMINATED,
    signal.SIGHUP: EXIT_TERMINATED,
    TIME_IS_OVER: EXIT_AGAIN,
    LAUNCHER_GONE: EXIT_AGAIN,
    WORKER_GONE: EXIT_FAILED,
}


def exit_code_of(cause: int | None) -> int:
    """The exit code of a run that a signal, or another of the causes of an end, has ended."""
    return OF_CAUSES[cause] if cause is not None else EXIT_DONE


def exit_code_for(error: Exception) -> int:
    """The exit code of a run that an error has ended."""
    mistake = isinstance(error, USER_MISTAKES) and not isinstance(error, TEMPORARY)
    return EXIT_USER_MISTAKE if mistake else EXIT_FAILED


class TrainingStopped(Exception):
    """The run cannot go on; the message says why and what is kept."""


class OutOfMemory(TrainingStopped):
    """There was not enough memory for a step."""


TEMPORARY = (HubUnreachable, TextUnreachable, TextLost, OutOfMemory)
"""Those that are nobody's mistake: the same start may succeed later."""


def is_lasting(error: Exception) -> bool:
    """Whether the same start would end in the same error: nothing to restart for."""
    return isinstance(error, (*USER_MISTAKES, TrainingStopped)) and not isinstance(error, TEMPORARY)
