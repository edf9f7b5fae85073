"""A start with `hub.standby`: wait while another attempt owns the run, then become its owner."""

from __future__ import annotations

import platform
import random
import signal
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from config.schema import Config
from config.stored import as_plain
from snapshot.disk.files import snapshot_folders, snapshots_in
from snapshot.disk.state import read_state
from snapshot.errors import OtherRun, SnapshotError
from snapshot.run_store import RunStore, newest_state, open_repo
from store.errors import (
    HubError,
    HubNoFile,
    HubNoRevision,
    HubOffline,
    HubRefused,
    HubUnreachable,
)
from store.kinds import ownership_of
from store.ownership import DONE, ENDS, Owner, duration, in_words, machine_name, utc
from store.standby import (
    EMPTIED,
    LONGEST_PAUSE_SECONDS,
    Hold,
    Verdict,
    Watch,
    longest_wait,
    with_jitter,
)
from training.distributed.agreement import decided_by_main
from training.distributed.environment import seconds_since_launch
from training.exits import EXIT_DONE, NothingToDo
from training.reporting.console import shown
from training.run.run_dir import ATTEMPTS, attempts_in, record_attempt
from training.run.same_run import refuse_other_run
from training.run.signals import OTHER_OWNER, TIME_IS_OVER, Signals, exit_code_of, name_of
from training.run.uploading import store_of

SLICE_SECONDS = 10.0
"""The longest that the other processes wait for the main process between two agreements."""
WAITS, OWNS, ENDS_NOW = "waits", "owns", "ends"


def own_run(accelerator: Accelerator, config: Config, signals: Signals) -> Hold | None:
    """Wait until no other attempt owns the run, and own it; the ownership, on the main process.

    None without `hub.standby` or a store, on the other processes, and for a run that is done. Every
    process must call this. The main process alone asks the store, and all agree every few seconds,
    so no collective times out. Raises NothingToDo if the run ended meanwhile, the errors of
    `open_repo` and of a store that cannot be read or refuses, and OtherRun for the run of another
    configuration.
    """
    store = store_of(config)
    if not config.hub.standby or store is None:
        return None
    slice_seconds = min(SLICE_SECONDS, config.run.start_timeout_seconds / 4)
    standby = None
    if accelerator.is_main_process:
        standby = Standby(config, store, signals)

    def step() -> list[Any]:
        assert standby is not None
        return list(standby.step(slice_seconds))

    while True:
        state, code = decided_by_main(accelerator, step)
        if state == ENDS_NOW:
            raise NothingToDo(code)
        if state == OWNS:
            return None if standby is None else standby.hold


class Standby:
    """The main process's part: it looks at the store and says what it sees."""

    def __init__(
        self,
        config: Config,
        store: RunStore,
        signals: Signals,
        say: Callable[[str], None] = lambda text: print(shown(text), flush=True),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.hold: Hold | None = None
        """The ownership, once this attempt has it."""
        self._config, self._store, self._signals = config, store, signals
        self._say, self._clock, self._sleep = say, clock, sleep
        self._run_dir = Path(config.run.dir)
        self._over = attempts_in(self._run_dir)  # those that other machines know, too
        self._local_run = run_id_in(self._run_dir)
        self._ownership = ownership_of(store.hub)
        self._watch = Watch(self._over, config.train.max_steps, clock)
        self._attempt_id = uuid.uuid4().hex
        self._chance = random.Random()
        self._next_look = clock()
        self._told: tuple[str, int] | None = None
        """The owner that the user knows of."""
        self._trouble: str | None = None
        """Why the store could not be read, as the user knows."""
        self._has_seen = False
        """Whether an owner was found."""
        self._pause = 0.0
        self._begun = False
        self._ends = float("inf")
        if config.run.max_minutes is not None:
            self._ends = clock() + 60 * config.run.max_minutes - seconds_since_launch()

    def step(self, seconds: float) -> tuple[str, int]:
        """Wait at most so long, and look at the store if that is due: the state, and a code."""
        if not self._begun:
            open_repo(self._store, can_do_without=False)  # creates it; refuses what is no run's
            self._begun = True
        until = min(self._next_look, self._clock() + seconds)
        while (left := until - self._clock()) > 0:
            if (code := self._stopped()) is not None:
                return ENDS_NOW, code
            self._sleep(min(left, 0.5))
        if (code := self._stopped()) is not None:
            return ENDS_NOW, code
        return (WAITS, 0) if self._clock() < self._next_look else self._look()

    def _stopped(self) -> int | None:
        """The exit code if a preemption notice or the time budget ends the wait."""
        cause = self._signals.cause
        if cause is None and self._clock() > self._ends:
            cause = TIME_IS_OVER
        if cause is None:
            return None
        self._say(f"standby   ended by {name_of(cause)}. The same command waits again.")
        return exit_code_of(cause)

    def _look(self) -> tuple[str, int]:
        try:
            found = self._ownership.look()
            if self._has_other_run(found):
                return OWNS, 0  # which the start refuses
            if found is None and self._has_seen:
                raise HubUnreachable(f"{self._store.hub.name} cannot be used: {EMPTIED}")
            self._has_seen = found is not None
            # This attempt took it before, and the answer was lost: there is no one to wait for.
            is_own = found is not None and found.attempt_id == self._attempt_id
            verdict = Verdict(is_free=True) if is_own else self._watch.judge(found)
            if self._trouble is not None:
                self._say(f"standby   {self._store.hub.name} can be read again")
            self._trouble, self._pause = None, 0.0
            if verdict.ends:
                return self._end(found, verdict)
            if verdict.is_free:
                return self._take(found)
            assert found is not None
            self._tell(found)
        except HubOffline:
            raise
        except (HubError, SnapshotError, OSError) as error:
            if isinstance(error, OtherRun):
                raise
            self._note_trouble(error)
        wait = max(self._watch.seconds_between_looks(), self._pause)
        self._next_look = self._clock() + with_jitter(wait, self._chance)
        return WAITS, 0

    def _has_other_run(self, found: Owner | None) -> bool:
        """Whether this disk has a snapshot of another run than the store."""
        if found is None or not found.step or self._local_run is None:
            return False
        return found.run_id != self._local_run

    def _take(self, found: Owner | None) -> tuple[str, int]:
        """Own the run, unless another standby was first."""
        if found is not None and found.attempt_id == self._attempt_id:
            owner: Owner | None = found
        elif (
            found is not None and found.ended == DONE and found.step >= self._config.train.max_steps
        ):
            return OWNS, 0  # nothing is left to own: the start sees that the run is finished
        else:
            if found is None and self._over and self._local_run is None:
                # A store that an attempt has owned names an owner.
                raise HubUnreachable(
                    f"{self._store.hub.name} is empty, and this run has used a store: "
                    f"{self._run_dir / ATTEMPTS} names its attempts. Mount its disk, or check the "
                    "name. To begin in an empty store, delete that file"
                )
            owner = self._ownership.take(
                Owner(
                    self._run_id(found),
                    self._attempt_id,
                    self._config.hub.silence_seconds,
                    machine_name(platform.node()),
                    since=utc(),
                )
            )
        if owner is None:
            self._next_look = self._clock() + with_jitter(1.0, self._chance)
            return WAITS, 0
        record_attempt(self._run_dir, self._attempt_id)
        self.hold = Hold(self._ownership, owner, lambda: self._signals.stop(OTHER_OWNER)).begin()
        if found is None or found is owner:
            self._say(
                f"standby   owns {self._store.hub.name}: another start waits, and takes over after "
                f"{duration(owner.silence_seconds)} without a sign of life"
            )
        else:
            is_over = found.attempt_id in self._over
            why = "it was an attempt of this start's machines" if is_over else _gone(found)
            self._say(f"standby   takes over from {found.as_words()} at step {found.step:,}: {why}")
        return OWNS, 0

    def _run_id(self, found: Owner | None) -> str:
        """The run: the owner's, that of this disk, or a new one."""
        if found is not None and found.run_id:
            return found.run_id
        return self._local_run or uuid.uuid4().hex

    def _end(self, found: Owner | None, verdict: Verdict) -> tuple[str, int]:
        """The run ended while this standby waited for its owner."""
        assert found is not None
        code = EXIT_DONE if verdict.ends == DONE else exit_code_of(signal.SIGINT)
        more = (
            "" if verdict.ends == DONE else " This standby ends, too; start it again to continue."
        )
        self._say(f"standby   {found.as_words()} has {ENDS[verdict.ends]} ({found.step:,}).{more}")
        return ENDS_NOW, code

    def _tell(self, found: Owner) -> None:
        """Say who owns the run, once for each owner. Raises OtherRun for another run's."""
        if self._told == (found.attempt_id, found.turn):
            return
        self._refuse_other(found)
        self._told = found.attempt_id, found.turn
        silence = found.silence_seconds
        self._say(
            f"standby   {self._store.hub.name} is owned by {found.as_words()} since "
            f"{in_words(found.since)}; step {found.step:,}, last sign of life "
            f"{in_words(found.seen)}\n"
            f"          takes over once that has ended, or has given no sign of life for "
            f"{duration(silence)}: at most {duration(longest_wait(silence))} after the last one"
        )

    def _refuse_other(self, found: Owner) -> None:
        """Raise OtherRun before the wait where this command could not continue the run."""
        state = newest_state(self._store)
        if state is not None:
            refuse_other_run(state, as_plain(self._config))

    def _note_trouble(self, error: Exception) -> None:
        """Say once that the store cannot be read, and look again after longer and longer pauses."""
        reason = str(error).rstrip(".")
        # A commit, or a file of it, may be gone between two requests.
        passes = isinstance(error, (HubNoRevision, HubNoFile))
        refuses = isinstance(error, (HubRefused, SnapshotError)) and not passes
        if self._told is None and (refuses or isinstance(error, HubUnreachable)):
            raise error  # nothing is known yet: a start that cannot ask must not train
        if self._trouble is None:
            self._say(
                f"standby   {reason}. Still waiting: as long as {self._store.hub.name} cannot be "
                "read, no time counts as silence."
            )
        self._trouble = reason
        asked = error.retry_after if isinstance(error, HubUnreachable) else None
        self._pause = min(max(1.0, 2 * self._pause, asked or 0.0), LONGEST_PAUSE_SECONDS)


def run_id_in(run_dir: Path) -> str | None:
    """The run of the newest snapshot in a directory; None if none can be read."""
    for folder in snapshot_folders(snapshots_in(run_dir)):
        with suppress(SnapshotError):
            return read_state(folder).run_id
    return None


def _gone(found: Owner) -> str:
    """Why a standby may take over."""
    if found.ended:
        return ENDS[found.ended]
    return f"no sign of life for {duration(found.silence_seconds)}"
