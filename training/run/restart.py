"""Whether a command with `snapshot.resume=never` is a restart of the run that it began itself.

Then a launcher, a job or a loop starts the next attempt. A run that is done, or that a person
stopped with Ctrl-C, has ended.
"""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

from config.schema import Config, ConfigError
from config.stored import as_plain
from snapshot.config_values import changed_values
from snapshot.disk.state import RunState
from snapshot.start_over import METRICS
from store.records import EVENTS
from training.distributed.environment import restarted_by_launcher
from training.exits import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER_MISTAKE
from training.reporting.events import read_events
from training.reporting.metrics import has_step
from training.run.run_dir import config_in
from training.run.signals import name_of


def is_restart(state: RunState | None, config: Config, code_before: int | None) -> bool:
    """Whether this command began the run of a state, and the run has not ended.

    Without a state, the run is the one in the run's directory, if it has no snapshot yet.
    `code_before` is the exit code of the start before this one; None if it left none.
    """
    run_dir = Path(config.run.dir)
    before = _without_snapshot(run_dir, config) if state is None else state.config
    if before is None or changed_values(before, as_plain(config)):
        return False
    if restarted_by_launcher():
        return True
    if code_before in (None, EXIT_USER_MISTAKE):
        # It was killed, or it was refused and says nothing about the run, or that is on the Hub.
        steps = 0 if state is None else state.step
        return steps < config.train.max_steps and not _stopped_by_a_person(run_dir)
    return code_before not in (EXIT_DONE, EXIT_INTERRUPTED)


def _without_snapshot(run_dir: Path, config: Config) -> dict[str, object] | None:
    """The configuration of a run that has not reached its first snapshot; None for any other."""
    with suppress(ConfigError, OSError):
        if not has_step(run_dir / METRICS, config.snapshot.every):
            return config_in(run_dir)
    return None


def _stopped_by_a_person(run_dir: Path) -> bool:
    """Whether the last attempt that began has noted that Ctrl-C stopped it."""
    kinds = ("start", "stop", "end")
    events = [one for one in read_events(run_dir / EVENTS) if one["event"] in kinds]
    return bool(events) and events[-1]["text"] == name_of(signal.SIGINT)
