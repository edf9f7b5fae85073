"""What an error means for the run: whose mistake it is, its exit code, whether to try again."""

from __future__ import annotations

from config.schema import ConfigError
from data.errors import DataError, TextLost, TextUnreachable
from snapshot.errors import SnapshotError
from store.errors import HubError, HubUnreachable
from training.exits import EXIT_FAILED, EXIT_USER_MISTAKE, OutOfMemory, TrainingStopped

USER_MISTAKES = (ConfigError, DataError, SnapshotError, HubError)
"""Errors that are shown as a sentence, without a traceback."""
TEMPORARY = (HubUnreachable, TextUnreachable, TextLost, OutOfMemory)
"""Errors that may pass: the same command may succeed later."""


def exit_code_for(error: Exception) -> int:
    """The exit code of a run that ends with an error."""
    mistake = isinstance(error, USER_MISTAKES) and not isinstance(error, TEMPORARY)
    return EXIT_USER_MISTAKE if mistake else EXIT_FAILED


def is_lasting(error: Exception) -> bool:
    """Whether the same command would end with the same error, so that a restart is useless."""
    return isinstance(error, (*USER_MISTAKES, TrainingStopped)) and not isinstance(error, TEMPORARY)
