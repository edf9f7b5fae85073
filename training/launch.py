"""The outside of a run: from the command line to `main(config)`, from its end to an exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from accelerate.state import PartialState
from accelerate.tracking import get_available_trackers

from snapshot.signals import Phase, Signals
from training.claim import note_exit
from training.compose import as_yaml, load_config
from training.config import Config, ConfigError
from training.environment import (
    first_on_its_machine,
    launched,
    restarts_left,
    speaks_for_the_run,
    under_accelerate,
)
from training.exits import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USER_MISTAKE,
    USER_MISTAKES,
    TrainingStopped,
    exit_code_of,
    is_lasting,
)
from training.help import help_text
from training.output import make_output_lossy, say_error
from training.peers import is_lost_peer
from training.saving import finish_writing
from training.together import FailedElsewhere
from training.uploading import finish_begun

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

    Exit codes: 0 done, 2 a mistake of the user's (a sentence, nothing lost), 1 failed; what a
    signal or the run's own time has ended: see `training.exits`. `accelerate launch` turns every
    code but 0 into 1, so it is also left in the run's directory.
    """
    make_output_lossy()
    arguments = sys.argv[1:]
    if any(argument in ("-h", "--help") for argument in arguments):
        print(help_text())
        sys.exit(0)
    signals: Signals | None = None
    try:
        config = load_config([argument for argument in arguments if argument != "--show"])
        if "--show" in arguments:
            print(as_yaml(config), end="")
            code = EXIT_DONE
        else:
            signals = Signals(config.run.grace_seconds, _end_by_signal, under_accelerate())
            code = main(config, signals)
            if code != EXIT_DONE and first_on_its_machine():  # all have agreed to end
                _end_launcher(code)
    except KeyboardInterrupt:  # before the signals are ours
        code = EXIT_INTERRUPTED
    except Exception as error:
        if signals is not None:
            signals.phase = Phase.FAILED
        code = EXIT_USER_MISTAKE if isinstance(error, USER_MISTAKES) else EXIT_FAILED
        if _say(error, hurry=signals is not None and signals.asked is not None):
            _end_launcher(code)
        finish_writing()
    _leave(code)


def _say(error: Exception, hurry: bool) -> bool:
    """Say an error once, first, and not among its echoes in other processes.

    Returns whether it ends the launcher too: another start would end in it as well.
    """
    speaks = getattr(error, "said_here", False) or first_on_its_machine()
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


def known_tracker(name: str | None) -> str | None:
    """`run.tracker`, as Accelerator takes it. Raises ConfigError for one that is not installed."""
    installed = sorted(str(tracker) for tracker in get_available_trackers())
    if name is not None and name not in installed:
        raise ConfigError(
            f"run.tracker={name} is not installed, or is no tracker of accelerate's. "
            f"Installed: {', '.join(installed) or 'none'}."
        )
    return name


def _end_by_signal(number: int, why: str) -> None:
    """End the process from the thread that minds the signals, whatever the others hang in."""
    if why and first_on_its_machine():
        # Not by print: the main thread may hold the stream, waiting for a reader that is gone.
        os.write(sys.stderr.fileno(), f"\nstopped by {why}. {GO_ON}\n".encode())
    if not why:  # an error has ended the run before, perhaps beside a snapshot
        finish_writing(WRITING_SECONDS)
    code = exit_code_of(number)
    if speaks_for_the_run():
        note_exit(code)
    os._exit(code)


def _end_launcher(code: int) -> None:
    """Have the launcher not start again what would only end again."""
    if restarts_left() > 0:
        if speaks_for_the_run():
            note_exit(code)  # while there is time: the launcher ends this process as well
        os.kill(os.getppid(), signal.SIGTERM)


def _leave(code: int) -> NoReturn:
    """End the process.

    Among several gloo processes an ordinary exit aborts about half the time (seen with torch 2.13),
    and the launcher takes that for a failure; so those leave at once, with everything written.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if speaks_for_the_run():
        note_exit(code)
    uploading = any(not one.daemon for one in threading.enumerate()[1:])  # by the Hub client
    if PartialState._shared_state.get("_num_processes", 1) > 1 or launched() or uploading:
        os._exit(code)
    sys.exit(code)
