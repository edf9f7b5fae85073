"""Exit codes of a run, and the errors that end it on purpose. Imports nothing heavy."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from common.command import EXIT_DONE as EXIT_DONE
from common.command import EXIT_FAILED as EXIT_FAILED
from common.command import EXIT_INTERRUPTED as EXIT_INTERRUPTED
from common.command import EXIT_USER_MISTAKE as EXIT_USER_MISTAKE

EXIT_AGAIN = 75
"""Stopped with a snapshot, to be started again (EX_TEMPFAIL in sysexits.h)."""
EXIT_TERMINATED = 143
"""Stopped by SIGTERM or SIGHUP."""
WRITING_SECONDS = 25
"""Seconds for a snapshot that began before an error; the launcher waits a little longer."""
RESUME = "The same command resumes from the newest snapshot; without one it starts at step 1."


class TrainingStopped(Exception):
    """The run cannot continue; the message says why, and which snapshot there is."""


class OutOfMemory(TrainingStopped):
    """There was not enough memory for a step."""


def exit_code_in(path: Path) -> int | None:
    """The exit code that an attempt has left in a file; None if it holds anything else."""
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None
