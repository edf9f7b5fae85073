"""When a standby takes over, and the signs of life of an owner. docs/hub.md states the rules.

All times are intervals of one machine's own clock: the clocks of machines may differ.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace

from data.printable import printable
from store.errors import HubUnreachable
from store.fence import Clock
from store.ownership import DONE, PERSON, Owner, Ownership, duration

SIGNS = 4
"""Signs of life that an owner gives within its announced silence: some may be late or fail."""
LOOKS = 8
"""How often a standby looks within that time."""
JITTER = 0.25
"""By which part of it the time between two looks varies, so that standbys do not meet."""
LONGEST_PAUSE_SECONDS = 300.0
"""Between two looks at a store that cannot be reached."""
RELEASE_SECONDS = 10.0
EMPTIED = "the store is empty, and it held this run before"
"""Its disk is not mounted, or somebody has deleted its files."""


@dataclass(frozen=True)
class Verdict:
    """What a look at the owner means for a standby."""

    is_free: bool = False
    """Whether to take over now."""
    ends: str = ""
    """DONE or PERSON if the run ended while this standby waited, so that it ends as well."""
    silent_seconds: float = 0.0
    """For how long the owner has given no sign of life."""


class Watch:
    """Whether the owner of a run is gone, as one standby sees it. Not thread-safe."""

    def __init__(self, over: Collection[str], steps: int, clock: Clock = time.monotonic) -> None:
        """`over` are attempts that are known to be over, `steps` those of the run in all."""
        self._over, self._steps, self._clock = frozenset(over), steps, clock
        self._owner: Owner | None = None
        self._looked_at = 0.0
        self._silent = 0.0
        self._has_waited = False
        """Whether this standby has seen an owner that lived."""

    def judge(self, found: Owner | None) -> Verdict:
        """What the owner that was found now means; None: there is no owner."""
        now = self._clock()
        before, self._owner = self._owner, found
        since, self._looked_at = self._looked_at, now
        if found is None or found.attempt_id in self._over:
            return Verdict(is_free=True)
        if found.ended:
            stays_ended = found.ended == PERSON or (
                found.ended == DONE and found.step >= self._steps
            )
            ends = found.ended if self._has_waited and stays_ended else ""
            return Verdict(is_free=not ends, ends=ends)
        self._has_waited = True
        is_same = before is not None and _signs_of(before) == _signs_of(found)
        # While the store could not be read, the owner may have given signs.
        gap = min(now - since, 2 * self.seconds_between_looks())
        self._silent = self._silent + gap if is_same else 0.0
        return Verdict(self._silent > found.silence_seconds, silent_seconds=self._silent)

    def seconds_between_looks(self) -> float:
        """Without jitter."""
        return 1.0 if self._owner is None else self._owner.silence_seconds / LOOKS


def _signs_of(owner: Owner) -> tuple[str, int, str, int]:
    return owner.attempt_id, owner.turn, owner.sign, owner.step


def with_jitter(seconds: float, chance: random.Random) -> float:
    """About so many seconds."""
    return seconds * chance.uniform(1 - JITTER, 1 + JITTER)


def longest_wait(silence_seconds: float) -> float:
    """From the last sign of life until a standby that can reach the store takes over, at most."""
    return silence_seconds * (1 + 2 * (1 + JITTER) / LOOKS)


class Hold:
    """An attempt's ownership of its run: signs of life from a thread, until it ends or loses it.

    It raises nothing.
    """

    def __init__(self, ownership: Ownership, owner: Owner, lost: Callable[[], object]) -> None:
        """`lost` is called once, from the thread, when another attempt owns the run."""
        self.owner = owner
        self._ownership, self._lost = ownership, lost
        self._changed = threading.Condition()
        self._asking = threading.Lock()
        self._is_over = False
        self._last_word: threading.Thread | None = None
        self._failed = 0
        """How many signs of life in a row have failed."""
        self._messages: list[str] = []

    def begin(self) -> Hold:
        """Begin to give signs of life; returns itself."""
        threading.Thread(target=self._beat, name="signs of life", daemon=True).start()
        return self

    def note(self, step: int) -> None:
        """The store has a newer step."""
        with self._changed:
            self.owner = replace(self.owner, step=step)

    def messages(self) -> list[str]:
        """Sentences for the user since the last call."""
        with self._changed:
            messages, self._messages = self._messages, []
            return messages

    def release(self, ended: str, seconds: float = RELEASE_SECONDS) -> None:
        """End the ownership with a last word, and wait at most so long until the store has it.

        A second call only waits.
        """
        with self._changed:
            if not self._is_over:
                self._is_over = True
                self.owner = replace(self.owner, ended=ended)
                self._changed.notify_all()
                word = threading.Thread(target=self._say_last, name="last word", daemon=True)
                word.start()
                self._last_word = word
            last_word = self._last_word
        if last_word is not None:
            last_word.join(max(0.0, seconds))

    def lose(self) -> None:
        """Another attempt owns the run: give no more signs of life."""
        with self._changed:
            if self._is_over:
                return
            self._is_over = True
            self._changed.notify_all()
        self._lost()

    def _say_last(self) -> None:
        with suppress(Exception), self._asking:
            self._ownership.release(self.owner)

    def _beat(self) -> None:
        pause = self.owner.silence_seconds / SIGNS
        while not self._wait(pause):
            try:
                with self._asking:
                    is_owner = self._sign()
                self._failed, pause = 0, self.owner.silence_seconds / SIGNS
            except Exception as error:  # the Hub's, the disk's, a library's: the next may succeed
                pause = self.owner.silence_seconds / SIGNS / 2
                self._note_failure(error)
                continue
            if not is_owner:
                self.lose()

    def _sign(self) -> bool:
        """Give a sign of life, if this attempt still owns the run; whether it does."""
        found = self._ownership.look()
        if found is None:  # nobody took the run: its disk is not mounted, or its files are deleted
            raise HubUnreachable(EMPTIED)
        if found.attempt_id != self.owner.attempt_id:
            return False
        if not self._is_over:
            self._ownership.sign(self.owner)
        return True

    def _note_failure(self, error: Exception) -> None:
        """Report the second failure in a row: one passes often."""
        self._failed += 1
        if self._failed == 2:
            reason = printable(str(error) or type(error).__name__).rstrip(".")
            with self._changed:
                self._messages.append(
                    f"signs of life to standbys fail: {reason}. Training continues; a standby that "
                    "can read the store takes over after "
                    f"{duration(self.owner.silence_seconds)} without one."
                )

    def _wait(self, seconds: float) -> bool:
        """Wait; whether the ownership is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over, seconds)
            return self._is_over
