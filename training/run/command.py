"""From the command line to `main(config, session)`, and from its end to an exit code."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from common.command import say_error
from config.compose import load_config, run_dir_of
from config.help import help_text
from config.schema import Config, ConfigError
from config.stored import as_yaml
from data.errors import TextLost
from training.distributed.launcher import is_local_main_process, launcher, restarts_left
from training.distributed.processes import (
    USER_MISTAKES,
    FailedElsewhere,
    exit_code_for,
    is_lasting,
    is_lost_peer,
)
from training.exits import EXIT_DONE, EXIT_INTERRUPTED, RESUME, TrainingStopped
from training.memory import in_words
from training.reporting.console import make_output_lossy
from training.run.run_dir import RunLock
from training.run.session import Session
from training.run.stopping import CAUSES, Phase

REPORTING_SECONDS = 30
"""How long a process waits for another one that reports the error of both."""
ECHO_SECONDS = 3
"""Seconds to wait after the loss of another process. The launcher ends local processes sooner."""
STOPPED_FLUSH_SECONDS = 20
"""Seconds for the last upload when a run stops by itself, while the other processes wait."""
LOST_PEER = "another process is gone, or cannot be reached"


def run_command(
    main: Callable[[Config, Session], int],
    load: Callable[[list[str]], Config] = load_config,
    session_of: Callable[[Config, RunLock], Session] = Session,
    about: str = "",
) -> NoReturn:
    """Run `main` with the configuration of the command line, and end the process.

    `about` is what `--help` says before the help of train.py.

    Exit codes: see `training.exits`. `accelerate launch` turns every code but 0 into 1, so the
    first process of each machine also leaves it in the run's directory.
    """
    make_output_lossy()
    with suppress(OSError):  # a stderr that is no file
        faulthandler.enable()  # a library that ends the process leaves the stack of its threads
    arguments = sys.argv[1:]
    if any(argument in ("-h", "--help") for argument in arguments):
        print(about + help_text())
        sys.exit(0)
    lock, session = RunLock(), None
    launcher()  # while it is alive
    try:
        if "--show" in arguments:
            arguments.remove("--show")
            print(as_yaml(load(arguments)), end="")
            code = EXIT_DONE
        else:
            try:
                config = load(arguments)
            except ConfigError:
                lock.leave_code_in(run_dir_of(arguments))
                raise
            lock.leave_code_in(Path(config.run.dir))
            session = session_of(config, lock)
            code = main(config, session)
            if code != EXIT_DONE and is_local_main_process():  # all have agreed to end
                _end_launcher(code, lock)
    except KeyboardInterrupt:  # before the session handles signals
        code = EXIT_INTERRUPTED
    except Exception as raised:
        code = _report(raised, session, lock)
    _leave(code, lock)


def _report(raised: Exception, session: Session | None, lock: RunLock) -> int:
    """Report an error that ended the attempt, and return its exit code."""
    cause, begun = None, False
    if session is not None:
        cause, begun = session.signals.cause, session.signals.phase is not Phase.NOTHING_BEGUN
    error = in_words(raised, begun)
    code = lock.note_exit(_code_for(error, cause))
    if session is not None:
        session.signals.phase = Phase.FAILED
    if _print(error, cause is not None, session):
        _end_launcher(code, lock)
    if session is not None:
        session.finish_writing()
    return code


def _code_for(error: Exception, cause: int | None) -> int:
    """The exit code for an error in a run that `cause` stops, if there is one."""
    if isinstance(error, FailedElsewhere):
        return error.code
    if cause is not None and is_lost_peer(error):  # the other processes have stopped already
        return CAUSES[cause].exit_code
    return exit_code_for(error)


def _print(error: Exception, stopping: bool, session: Session | None) -> bool:
    """Print an error in one process only, before the echoes of it in the others.

    Returns whether it ends the launcher too, because a restart would fail again.
    """
    # Of a lost text, only the process that read has the error; the others see that it is gone.
    alone = getattr(error, "reported_here", False) or isinstance(error, TextLost)
    prints = alone or is_local_main_process()
    has_sentence = isinstance(error, (*USER_MISTAKES, TrainingStopped))
    if isinstance(error, FailedElsewhere) or (has_sentence and not prints):
        # When a process ends, the launcher ends all: the one that reports must be the first.
        time.sleep(REPORTING_SECONDS)
        return isinstance(error, FailedElsewhere) and error.for_good and prints
    if has_sentence:
        is_stop = isinstance(error, TrainingStopped)
        say_error(f"{'stopped' if is_stop else 'error'}: {error}")
        if is_stop and session is not None:
            session.flush_uploads(STOPPED_FLUSH_SECONDS)
        return is_lasting(error)
    if not is_lost_peer(error):
        say_error("".join(traceback.format_exception(error)).rstrip())
    elif not stopping:
        time.sleep(ECHO_SECONDS)
        started_by = launcher()
        if prints and started_by is not None and started_by.lost_a_worker():
            time.sleep(REPORTING_SECONDS)  # on a busy machine it ends this one a little later
        if prints:
            say_error(f"stopped: {LOST_PEER}: {str(error).splitlines()[0]}. {RESUME}")
    return False


def _end_launcher(code: int, lock: RunLock) -> None:
    """Keep the launcher from restarting what would only end again."""
    started_by = launcher()
    if restarts_left() > 0 and started_by is not None:
        lock.note_exit(code)  # before the launcher ends this process as well
        started_by.stop()


def _leave(code: int, lock: RunLock) -> NoReturn:
    """End the process at once, with everything written, and wait for no thread or exit handler.

    With several gloo processes an ordinary exit aborts about half the time (seen with torch 2.13),
    and the launcher takes that for a failure. Exit handlers of trackers wait for their servers.
    """
    code = lock.note_exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
