"""The outside of a run: from the command line to `main(config)`, from its end to an exit code."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from accelerate.state import PartialState
from accelerate.tracking import get_available_trackers

from config.compose import as_yaml, load_config, run_dir_of
from config.help import help_text
from config.schema import Config, ConfigError
from data.errors import TextLost
from training.distributed.agreement import FailedElsewhere
from training.distributed.environment import is_local_main_process, launched, restarts_left
from training.distributed.launcher import launcher
from training.distributed.timeouts import is_lost_peer
from training.exits import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    USER_MISTAKES,
    TrainingStopped,
    exit_code_for,
    exit_code_of,
    is_lasting,
)
from training.out_of_memory import in_words
from training.reporting.output import make_output_lossy, say_error
from training.run.run_lock import expect, note_exit
from training.run.saving import finish_writing
from training.run.signals import LAST_WORDS_SECONDS, Phase, Signals
from training.run.uploading import finish_begun

SPEAKING_SECONDS = 30
ECHO_SECONDS = 3
"""After the loss of another process: on the same machine the launcher ends this one sooner."""
STOPPED_FLUSH_SECONDS = 20
"""For the upload of the last good snapshot, when a run stops by itself: while the others wait."""
WRITING_SECONDS = 25
"""For a snapshot that was begun before an error: a little less than the launcher's patience."""
LOST_PEER = "another process is gone, or cannot be reached"
GO_ON = "The same command goes on from the newest snapshot."


def run_command(main: Callable[[Config, Signals], int]) -> NoReturn:
    """Run `main` with the configuration of the command line, and end the process.

    Exit codes: see `training.exits`. `accelerate launch` turns every code but 0 into 1, so the
    first process of each machine also leaves it in the run's directory.
    """
    make_output_lossy()
    arguments = sys.argv[1:]
    if any(argument in ("-h", "--help") for argument in arguments):
        print(help_text())
        sys.exit(0)
    signals: Signals | None = None
    started_by = launcher()  # while it lives
    try:
        if "--show" in arguments:
            arguments.remove("--show")
            print(as_yaml(load_config(arguments)), end="")
            code = EXIT_DONE
        else:
            config = _load(arguments)
            expect(Path(config.run.dir))
            signals = Signals(config.run.grace_seconds, _end_by_signal, started_by)
            code = main(config, signals)
            if code != EXIT_DONE and is_local_main_process():  # all have agreed to end
                _end_launcher(code)
    except KeyboardInterrupt:  # before the signals are ours
        code = EXIT_INTERRUPTED
    except Exception as raised:
        begun = signals is not None and signals.phase is not Phase.NOTHING_BEGUN
        error = in_words(raised, begun)
        code = note_exit(_code_for(error, signals))
        if signals is not None:
            signals.phase = Phase.FAILED
        if _say(error, hurry=signals is not None and signals.asked is not None):
            _end_launcher(code)
        finish_writing()
    _leave(code)


def _load(arguments: list[str]) -> Config:
    try:
        return load_config(arguments)
    except ConfigError:
        if (run_dir := run_dir_of(arguments)) is not None:
            expect(run_dir)
        raise


def _code_for(error: Exception, signals: Signals | None) -> int:
    """The exit code for an error. In a run that is told to stop, the others may be gone already."""
    if isinstance(error, FailedElsewhere):
        return error.code
    if signals is not None and signals.asked is not None and is_lost_peer(error):
        return exit_code_of(signals.asked)
    return exit_code_for(error)


def _say(error: Exception, hurry: bool) -> bool:
    """Say an error once, first, and not among its echoes in other processes.

    Returns whether it ends the launcher too: another start would end in it as well.
    """
    alone = isinstance(error, TextLost)  # in the process that read; the others only lose it
    speaks = getattr(error, "reported_here", False) or alone or is_local_main_process()
    if isinstance(error, FailedElsewhere):
        # Once a process has ended, the launcher ends all: not before the one that says it.
        time.sleep(SPEAKING_SECONDS)
        return error.for_good and speaks
    if isinstance(error, (*USER_MISTAKES, TrainingStopped)):
        if not speaks:
            time.sleep(SPEAKING_SECONDS)
            return False
        stopped = isinstance(error, TrainingStopped)
        say_error(f"{'stopped' if stopped else 'error'}: {error}")
        if stopped:
            finish_begun(STOPPED_FLUSH_SECONDS)
        return is_lasting(error)
    if is_lost_peer(error):
        if not hurry:
            time.sleep(ECHO_SECONDS)
        if speaks and not hurry:
            words = str(error).splitlines()[0]
            say_error(f"stopped: {LOST_PEER}: {words}. {GO_ON}")
        return False
    say_error("".join(traceback.format_exception(error)).rstrip())
    return False


def check_tracker(name: str | None) -> str | None:
    """`run.tracker`, as Accelerator takes it. Raises ConfigError for one that is not installed."""
    installed = sorted(str(tracker) for tracker in get_available_trackers())
    if name is not None and name not in installed:
        raise ConfigError(
            f"run.tracker={name} is not installed, or is no tracker of accelerate's. "
            f"Installed: {', '.join(installed) or 'none'}."
        )
    return name


def _end_by_signal(cause: int, why: str) -> None:
    """End the process from the thread that handles the signals, whatever the others hang in."""
    code = exit_code_of(cause)
    try:
        code = note_exit(code)
        if why and is_local_main_process():
            _write_now(f"\nstopped by {why}. {GO_ON}\n")
        if not why:  # an error has ended the run before, perhaps while a snapshot is written
            finish_writing(WRITING_SECONDS)
    finally:
        os._exit(code)


def _write_now(text: str) -> None:
    """Write to stderr, if it takes that at once: its terminal or reader may be gone, or stopped.

    Not by print: the main thread may hold the stream, waiting for that reader.
    """
    with suppress(OSError, ValueError, AttributeError):
        number = sys.stderr.fileno()
        if select.select([], [number], [], LAST_WORDS_SECONDS)[1]:
            os.write(number, text.encode())


def _end_launcher(code: int) -> None:
    """Have the launcher not start again what would only end again."""
    started_by = launcher()
    if restarts_left() > 0 and started_by is not None:
        note_exit(code)  # while there is time: the launcher ends this process as well
        started_by.stop()


def _leave(code: int) -> NoReturn:
    """End the process.

    Among several gloo processes an ordinary exit aborts about half the time (seen with torch 2.13),
    and the launcher takes that for a failure; so those leave at once, with everything written.
    """
    code = note_exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    uploading = any(not one.daemon for one in threading.enumerate()[1:])  # by the Hub client
    if PartialState._shared_state.get("_num_processes", 1) > 1 or launched() or uploading:
        os._exit(code)
    sys.exit(code)
