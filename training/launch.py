"""The outside of a run: from the command line to `main(config)`, from its end to an exit code."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from accelerate.state import PartialState
from accelerate.tracking import get_available_trackers

from data.errors import DataError
from snapshot.errors import SnapshotError
from snapshot.hub_errors import HubError
from training.compose import as_yaml, load_config
from training.config import Config, ConfigError
from training.environment import first_on_its_machine, launched
from training.help import help_text
from training.report import TrainingStopped
from training.together import FailedElsewhere
from training.uploading import finish_begun

EXIT_FAILED = 1
EXIT_USER_MISTAKE = 2
EXIT_INTERRUPTED = 130
SPEAKING_SECONDS = 30
STOPPED_FLUSH_SECONDS = 20
"""For the upload of the last good snapshot, when a run stops by itself: while the others wait."""


def run_command(main: Callable[[Config], None]) -> NoReturn:
    """Run `main` with the configuration of the command line, and end the process.

    Exit codes: 0 done, 2 a mistake of the user's (a sentence, nothing lost), 130 interrupted, 1 all
    else. `accelerate launch` turns every code but 0 into 1.
    """
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal lacks, of the text or of a sample, must not stop a run.
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    arguments = sys.argv[1:]
    if any(argument in ("-h", "--help") for argument in arguments):
        print(help_text())
        sys.exit(0)
    try:
        config = load_config([argument for argument in arguments if argument != "--show"])
        if "--show" in arguments:
            print(as_yaml(config), end="")
        else:
            main(config)
        code = 0
    except (ConfigError, DataError, SnapshotError, HubError) as error:
        _say_once(f"error: {error}", error)
        code = EXIT_USER_MISTAKE
    except TrainingStopped as error:
        _say_once(f"stopped: {error}", error)
        finish_begun(STOPPED_FLUSH_SECONDS)
        code = EXIT_FAILED
    except FailedElsewhere:
        _let_the_other_speak()
        code = EXIT_FAILED
    except KeyboardInterrupt:
        _say_once("interrupted; the same command goes on from the newest snapshot.", None)
        code = EXIT_INTERRUPTED
    except Exception:
        traceback.print_exc()
        code = EXIT_FAILED
    _leave(code)


def known_tracker(name: str | None) -> str | None:
    """`run.tracker`, as Accelerator takes it. Raises ConfigError for one that is not installed."""
    installed = sorted(str(tracker) for tracker in get_available_trackers())
    if name is not None and name not in installed:
        raise ConfigError(
            f"run.tracker={name} is not installed, or is no tracker of accelerate's. "
            f"Installed: {', '.join(installed) or 'none'}."
        )
    return name


def _say_once(text: str, error: Exception | None) -> None:
    """Print an error where only one process has it, or, where all have it, once on each machine."""
    if getattr(error, "said_here", False) or first_on_its_machine():
        print(text, file=sys.stderr, flush=True)
    elif error is not None:
        _let_the_other_speak()


def _let_the_other_speak() -> None:
    """Do not end before the process that says the error: once one has ended, the launcher ends all.

    Its signal cuts this short.
    """
    time.sleep(SPEAKING_SECONDS)


def _leave(code: int) -> NoReturn:
    """End the process.

    Among several gloo processes an ordinary exit aborts about half the time (seen with torch 2.13),
    and the launcher takes that for a failure; so those leave at once, with everything written.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    uploading = any(not one.daemon for one in threading.enumerate()[1:])  # by the Hub client
    if PartialState._shared_state.get("_num_processes", 1) > 1 or launched() or uploading:
        os._exit(code)
    sys.exit(code)
