"""The owner of a repo's run: the attempt in `latest.json` at the head.

Its sign of life between commits is a tag, whose name has the time: `alive-3f2a1b2c-1795775464`. A
tag is no commit, so it leaves the history and the head alone, and is not in the Hub's limit of
commits per hour.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import replace

import huggingface_hub  # imports the rest at its first use

from snapshot.disk.files import folder_name
from store.errors import HubConflict, HubError, HubRefused
from store.fence import SHORTEST_SILENCE_SECONDS, USUAL_SILENCE_SECONDS
from store.latest import LATEST, SNAPSHOTS, Latest, latest_as_bytes
from store.ownership import Owner, owner_on_card, utc
from store.repo import ALIVE, Hub
from store.store import BRANCH

CARD = "README.md"
CARD_ROW = re.compile(r"^\| owner \|.*\|$", re.MULTILINE)
LARGEST_CARD_BYTES = 1 << 20


class RepoOwnership:
    """Reads and changes the owner of a repo."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._seen: tuple[str, Latest | None, bool] | None = None
        """The head that was read last, its latest.json, and whether it has a model card."""
        self._tags: list[str] | None = None
        """Tags of signs of life to delete; None before the first sign."""

    def look(self) -> Owner | None:
        """The owner. Two requests while no commit comes."""
        latest = self._read()[1]
        if latest is None:
            return None
        sign, silence, seen = str(latest.heartbeat), latest.silence_seconds, latest.seen
        if latest.alive_seconds and not latest.ended:
            silence = latest.alive_seconds
            times = [
                int(name[2]) for name in self._alive_tags() if name[1] == latest.attempt_id[:8]
            ]
            if times:
                sign, seen = f"{sign}-{max(times)}", max(seen, utc(max(times)))
        ended = latest.ended or ("again" if silence == 0 else "")
        known = Owner(latest.run_id, latest.attempt_id, silence, step=latest.step, sign=sign)
        return known.with_texts(latest.machine, latest.since, seen, ended)

    def take(self, mine: Owner) -> Owner | None:
        """Become the owner by a commit on top of the head that was read last."""
        assert self._seen is not None, "look comes first"
        head, before, has_card = self._seen
        alive = int(mine.silence_seconds) if self._can_tag(mine) else 0
        latest = Latest(
            mine.run_id,
            mine.attempt_id,
            0,
            f"{SNAPSHOTS}/{folder_name(0)}",
            "0" * 64,
        )
        if before is not None and before.has_snapshot:
            latest = replace(before, attempt_id=mine.attempt_id)
        latest = replace(
            latest,
            commits=1 + (0 if before is None else before.commits),
            heartbeat=1,
            silence_seconds=SHORTEST_SILENCE_SECONDS if alive else USUAL_SILENCE_SECONDS,
            machine=mine.machine,
            since=mine.since,
            seen=utc(),
            ended="",
            alive_seconds=alive,
        )
        additions = [huggingface_hub.CommitOperationAdd(LATEST, latest_as_bytes(latest))]
        if has_card and (card := self._card(head, mine)) is not None:
            additions.append(huggingface_hub.CommitOperationAdd(CARD, card))
        message = f"Step {latest.step} is the newest; {mine.as_words()} owns the run"
        if not self._commit(additions, message, head):
            self._untag()
            return None
        return replace(mine, run_id=latest.run_id, step=latest.step)

    def sign(self, mine: Owner) -> None:
        """Replace the tag. Where the server has none, the uploads' heartbeats are the signs."""
        if self._tags is not None:
            self._tag(mine)

    def release(self, mine: Owner) -> None:
        """Commit that the attempt has ended, unless its last upload did, and remove its tag."""
        try:
            head, latest, has_card = self._read()
            owns = latest is not None and latest.attempt_id == mine.attempt_id
            if latest is not None and owns and not latest.ended:
                latest = replace(
                    latest,
                    heartbeat=latest.heartbeat + 1,
                    silence_seconds=0,
                    seen=utc(),
                    ended=mine.ended,
                )
                additions = [huggingface_hub.CommitOperationAdd(LATEST, latest_as_bytes(latest))]
                if has_card and (card := self._card(head, mine)) is not None:
                    additions.append(huggingface_hub.CommitOperationAdd(CARD, card))
                title = f"Step {latest.step} is the newest; {mine.as_words()} has ended"
                self._commit(additions, title, head)
        finally:
            self._untag()

    def _read(self) -> tuple[str, Latest | None, bool]:
        """The head, its latest.json, and whether it has a card; read again if the head moved.

        Raises HubRefused if it holds other files and no latest.json: nobody may own it then.
        """
        head, _ = self._hub.head()
        if self._seen is None or self._seen[0] != head:
            files = self._hub.files(head)
            if LATEST not in files and (found := self._hub.foreign_file(files)):
                raise HubRefused(
                    f"{self._hub.key} holds {found} and no {LATEST}, so its owner is unknown. If "
                    "it is the repo of a run, restore that file from an earlier commit.",
                    f"no {LATEST}",
                )
            self._seen = head, self._hub.latest(head, files), CARD in files
        return self._seen

    def _commit(
        self, additions: list[huggingface_hub.CommitOperationAdd], message: str, head: str
    ) -> bool:
        """Whether the head was still there for this commit."""
        if self._hub.head()[0] != head:  # the server may ignore the parent
            return False
        try:
            self._hub.commit(additions, message, head)
        except HubConflict:
            return False
        except HubError as error:
            if not error.about_card:
                raise
            self._hub.commit(additions[:1], message, head)
        return True

    def _card(self, head: str, mine: Owner) -> bytes | None:
        """The model card of a commit with another owner; None if it has no row for that."""
        with suppress(HubRefused, UnicodeDecodeError):
            text = self._hub.read(head, CARD, LARGEST_CARD_BYTES).decode()
            if CARD_ROW.search(text):
                row = card_row(replace(mine, seen=utc()))
                return CARD_ROW.sub(lambda _: row, text, count=1).encode()
        return None

    def _alive_tags(self) -> list[re.Match[str]]:
        return [match for name in self._hub.alive_tags() if (match := ALIVE.fullmatch(name))]

    def _can_tag(self, mine: Owner) -> bool:
        """Give the first sign of life; whether the server has tags."""
        try:
            self._tags = [match[0] for match in self._alive_tags()]
            self._tag(mine)
        except HubRefused:
            self._tags = None
        return self._tags is not None

    def _tag(self, mine: Owner) -> None:
        """Create the tag of this second, then delete the ones before."""
        assert self._tags is not None
        name = f"alive-{mine.attempt_id[:8]}-{int(time.time())}"
        if name not in self._tags:
            self._hub.tag(name, BRANCH, replace=False)
            self._tags.append(name)
        self._delete(self._tags[:-1])

    def _untag(self) -> None:
        if self._tags is not None:
            self._delete(list(self._tags))

    def _delete(self, names: list[str]) -> None:
        assert self._tags is not None
        for name in names:
            with suppress(HubRefused):  # somebody else has deleted it
                self._hub.untag(name)
            self._tags.remove(name)


def card_row(owner: Owner) -> str:
    """The row of a model card's table that names the owner, as it is when the card is written."""
    return f"| owner | {owner_on_card(owner)} |"
