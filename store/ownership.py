"""Who owns the run of a store now: what a standby waits for, and `python -m snapshot status` shows.

The owner is the attempt that may write. It changes by one atomic step, which each kind of store has
(`Ownership.take`), so of several attempts that want it one gets it.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Protocol

from data.printable import printable

DONE, AGAIN, PERSON = "done", "again", "person"
ENDS = {
    DONE: "ended: all steps are done",
    AGAIN: "stopped, to be started again",
    PERSON: "stopped by a person (Ctrl-C)",
}
"""How an attempt can end, in words. One that is killed does not say that it ends."""
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
LONGEST_NAME = 80


@dataclass(frozen=True)
class Owner:
    """The attempt that owns a run. Its texts are from outside: they are printable and short."""

    run_id: str
    attempt_id: str
    silence_seconds: float
    """While it lives, it gives another sign of life within so many seconds."""
    machine: str = ""
    since: str = ""
    """When it became the owner; this and `seen` are UTC, by the clock of its machine."""
    seen: str = ""
    """Its last sign of life."""
    step: int = 0
    """The newest step in the store."""
    ended: str = ""
    """A key of `ENDS`; empty while it trains."""
    sign: str = ""
    """Another text after each sign of life."""
    turn: int = 0
    """In a store of files, how many owners there have been; 0 for one that has made no claim."""

    def as_words(self) -> str:
        """'attempt 3f2a1b2c on my-laptop'."""
        return f"attempt {printable(self.attempt_id[:8])} on {self.machine or 'an unknown machine'}"

    def state(self, now: float) -> str:
        """Training, ended, stopped or silent, at a time in seconds since 1970."""
        if self.ended:
            return ENDS[self.ended]
        age = seconds_since(self.seen, now)
        if age is None or age <= self.silence_seconds:
            return "training"
        return f"silent: it announced a sign of life every {duration(self.silence_seconds)} at most"

    def with_texts(self, machine: str, since: str, seen: str, ended: str) -> Owner:
        """The same with those fields, from untrusted texts."""
        return replace(
            self,
            machine=machine_name(machine),
            since=since if TIME.fullmatch(since) else "",
            seen=seen if TIME.fullmatch(seen) else "",
            ended=ended if ended in ENDS else "",
        )

    def now(self, step: int, ended: str = "") -> Owner:
        """The same owner at a step, seen now."""
        return replace(self, step=step, ended=ended, seen=utc())


def machine_name(name: str) -> str:
    """A machine's name in letters that mean nothing in a table of Markdown."""
    return re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII)[:LONGEST_NAME]


def owner_on_card(owner: Owner) -> str:
    """The owner, for a model card that is written now."""
    return (
        f"{owner.as_words()}, since {in_words(owner.since)}; {owner.state(time.time())} at "
        f"{in_words(owner.seen)}, when this was written"
    )


class Ownership(Protocol):
    """Reads and changes the owner of one store. Every method raises HubError, some SnapshotError.

    Not thread-safe.
    """

    def look(self) -> Owner | None:
        """The owner; None if nobody has written to the store. Few requests."""

    def take(self, mine: Owner) -> Owner | None:
        """Become the owner in the place of the one that `look` found last.

        Returns the owner as it is in the store then; None if another attempt was first. After an
        error the outcome is unknown: `look` shows it.
        """

    def sign(self, mine: Owner) -> None:
        """Give a sign of life. The owner calls this."""

    def release(self, mine: Owner) -> None:
        """Say that the owner has ended, as `mine.ended` says; nothing if it is not the owner."""


def utc(seconds: float | None = None) -> str:
    """A time, by default now, as in '2026-11-27T10:31:04Z'."""
    seconds = time.time() if seconds is None else seconds
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_since(text: str, now: float) -> float | None:
    """Seconds from a time, as `utc` writes it, to `now`; None if the text is no time."""
    try:
        return now - datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def in_words(text: str) -> str:
    """A time of `utc` for a person: '2026-11-27 10:31:04 UTC'."""
    return f"{text[:10]} {text[11:19]} UTC" if TIME.fullmatch(text) else "unknown"


def duration(seconds: float) -> str:
    """'0:12', '2:05:00'."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
