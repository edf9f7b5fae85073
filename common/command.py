"""What all commands have in common: exit codes, errors on stderr, and the end of their output."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from common.printable import shown

EXIT_DONE, EXIT_FAILED, EXIT_USER_MISTAKE, EXIT_INTERRUPTED = 0, 1, 2, 130
EXIT_NOT_READ = 141
"""The exit code that a shell shows for a program that SIGPIPE ended."""


def exit_code_of(command: Callable[[], int | None], *mistakes: type[Exception]) -> int:
    """Run a command, which may return an exit code. Whoever reads its output may leave.

    A file that cannot be read or written is a user error, and so are the `mistakes`.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None if it is closed
        stream.reconfigure(errors="backslashreplace")
    try:
        code = command()
        if sys.stdout is not None:
            sys.stdout.flush()  # a closed pipe raises here, not while Python exits
        return code or EXIT_DONE
    except mistakes as error:
        say_error(f"error: {error}")
        return EXIT_USER_MISTAKE
    except BrokenPipeError:
        _discard_output()
        return EXIT_NOT_READ
    except KeyboardInterrupt:
        _discard_output()
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.filename is not None:
            say_error(f"error: {error.filename}: {error.strerror}.")
            return EXIT_USER_MISTAKE
        _discard_output()
        say_error(f"error: the output: {error.strerror or error}.")
        return EXIT_FAILED


def say_error(text: str) -> None:
    """Print on stderr, above a progress bar if there is one, and safe to print anywhere."""
    from tqdm import tqdm  # only here: --help is faster without it

    tqdm.write(shown(text), file=sys.stderr)
    sys.stderr.flush()


def _discard_output() -> None:
    """Discard buffered output, or the interpreter would fail to flush it at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
