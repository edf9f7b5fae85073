"""What the commands that print have in common: the end of their output, and of themselves."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from common.printable import printable

EXIT_FAILED, EXIT_USER_MISTAKE, EXIT_INTERRUPTED = 1, 2, 130
EXIT_NOT_READ = 141
"""The exit code that a shell shows for a program that SIGPIPE ended."""


def exit_code_of(command: Callable[[], int]) -> int:
    """Run a command, which returns its exit code. Whoever reads its output may leave.

    A file that cannot be read or written is a user error.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None if it is closed
        stream.reconfigure(errors="backslashreplace")
    try:
        code = command()
        if sys.stdout is not None:
            sys.stdout.flush()  # a closed pipe raises here, not while Python exits
        return code
    except BrokenPipeError:
        _discard_output()
        return EXIT_NOT_READ
    except KeyboardInterrupt:
        _discard_output()
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.filename is not None:
            say_error(f"{error.filename}: {error.strerror}.")
            return EXIT_USER_MISTAKE
        _discard_output()
        say_error(f"the output: {error.strerror or error}.")
        return EXIT_FAILED


def say_error(sentences: str) -> None:
    """Print an error on stderr."""
    print(f"error: {printable(sentences, multiline=True)}", file=sys.stderr)


def _discard_output() -> None:
    """Discard buffered output, or the interpreter would fail to flush it at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
