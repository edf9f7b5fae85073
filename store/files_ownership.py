"""The owner of the run in a store of files, which has no commits.

owner-00000003.json                 the claim of the third owner; the highest number counts
<run>/<attempt>/alive.json          its signs of life, its step and its end

A store that creates a file only where there is none gives each number to one attempt. A bucket of
the Hub replaces files, so there an attempt's claim has its name in it, and all wait until every
claim of that number must be visible; the first name of them counts.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from snapshot.errors import SnapshotError
from store.fence import USUAL_SILENCE_SECONDS
from store.files import ALIVE, CLAIM, LARGEST_JSON_BYTES, Files, run_of, whole_snapshots
from store.latest import remote_step
from store.ownership import Owner, utc
from store.store import RemoteFile

SETTLE_SECONDS = 5.0
"""In a bucket, within which an attempt that found a number free must have written its claim."""
IDS = re.compile("[0-9a-f]{32}")
LARGEST_BYTES = 10_000


class FilesOwnership:
    """Reads and changes the owner of a store of files."""

    def __init__(self, store: Files) -> None:
        self._store = store
        self._turn, self._looked_at = 0, 0.0
        """The highest claim that was found last, and when, by time.monotonic()."""
        self._signs = 0

    def look(self) -> Owner | None:
        """The owner: by the highest claim; without one, the attempt with the newest snapshot.

        That one counts as well where the claim's attempt has ended before it uploaded that: an
        attempt without hub.standby makes no claim. Raises HubMissing if there is no store.
        """
        self._looked_at = time.monotonic()
        listed = self._store.files("")
        claims = claims_in(listed)
        self._turn = max(claims, default=0)
        whole = whole_snapshots(listed)
        if claims:
            found = self._winner(claims[self._turn], listed)
            claim = self._json(found, listed)
        elif whole:
            run, attempt, _ = whole[0].split("/")
            claim = {"run_id": run, "attempt_id": attempt}
        else:
            return None
        run, attempt = str(claim.get("run_id")), str(claim.get("attempt_id"))
        if not (IDS.fullmatch(run) and IDS.fullmatch(attempt)):
            # Of an attempt that was killed while it wrote this. Nobody else knows it.
            return Owner("", "unknown", USUAL_SILENCE_SECONDS, turn=self._turn)
        alive = self._alive(run, attempt, listed)
        last = alive.get("step")
        if claims and alive.get("ended") and isinstance(last, int):
            later = [one for one in whole[:1] if run_of(one) == run and remote_step(one) > last]
            if later and (other := later[0].split("/")[1]) != attempt:
                claim, attempt = {}, other
                alive = self._alive(run, attempt, listed)
        steps = [remote_step(folder) for folder in whole if run_of(folder) == run]
        texts = {name: str(alive.get(name, claim.get(name, ""))) for name in TEXTS}
        known = Owner(
            run,
            attempt,
            _seconds(alive.get("silence_seconds", claim.get("silence_seconds"))),
            step=max(steps, default=0),
            sign=json.dumps([alive.get("signs"), *steps[:1]]),
            turn=self._turn,
        )
        return known.with_texts(**texts)

    def take(self, mine: Owner) -> Owner | None:
        """Become the owner with the next number after the one that was found last."""
        turn = self._turn + 1
        mine = replace(mine, turn=turn, seen=utc())
        own = claim_path(turn, None if self._store.creates_files else mine.attempt_id[:8])
        content = {"run_id": mine.run_id, "attempt_id": mine.attempt_id, **_said(mine)}
        if self._store.creates_files:
            if not self._store.create_file(own, json.dumps(content).encode()):
                return None
        else:
            self._write({own: content})
            if time.monotonic() - self._looked_at > SETTLE_SECONDS:
                self._store.delete([own])  # too late: another one may have looked already
                return None
            time.sleep(2 * SETTLE_SECONDS)
        listed = self._store.files("")
        claims = claims_in(listed)
        if max(claims, default=0) != turn or self._winner(claims[turn], listed) != own:
            return None
        self.sign(mine)
        steps = [remote_step(one) for one in whole_snapshots(listed) if run_of(one) == mine.run_id]
        return replace(mine, step=max(steps, default=0))

    def sign(self, mine: Owner) -> None:
        """Replace alive.json. No other attempt writes to that folder."""
        self._signs += 1
        content = {"signs": self._signs, "step": mine.step, **_said(replace(mine, seen=utc()))}
        self._write({f"{mine.run_id}/{mine.attempt_id}/{ALIVE}": content})

    def release(self, mine: Owner) -> None:
        """Write the end to alive.json."""
        self.sign(mine)

    def _alive(self, run: str, attempt: str, listed: Mapping[str, RemoteFile]) -> Any:
        """The last sign of life of an attempt; empty if it has given none."""
        path = f"{run}/{attempt}/{ALIVE}"
        return self._json(path, listed) if path in listed else {}

    def _winner(self, paths: list[str], listed: Mapping[str, RemoteFile]) -> str:
        """The claim that counts, of several with one number: one that has given a sign of life."""
        if len(paths) > 1:
            for path in paths:
                claim = self._json(path, listed)
                if f"{claim.get('run_id')}/{claim.get('attempt_id')}/{ALIVE}" in listed:
                    return path
        return paths[0]

    def _json(self, path: str, listed: Mapping[str, RemoteFile]) -> Any:
        """An object in a small file; empty if it is none, or is gone."""
        file = listed[path]
        content: Any = {}
        if file.size <= LARGEST_BYTES:
            with suppress(ValueError, SnapshotError, RecursionError):
                content = json.loads(self._store.read("", path, LARGEST_JSON_BYTES))
        return content if isinstance(content, dict) else {}

    def _write(self, files: Mapping[str, Mapping[str, Any]]) -> None:
        self._store.put({path: json.dumps(content).encode() for path, content in files.items()})


TEXTS = ("machine", "since", "seen", "ended")


def _said(owner: Owner) -> dict[str, Any]:
    return {
        **{name: getattr(owner, name) for name in TEXTS},
        "silence_seconds": owner.silence_seconds,
    }


def _seconds(found: object) -> float:
    """An announced silence, from untrusted JSON; an hour where none is announced."""
    known = isinstance(found, int | float) and 0 < found < 24 * 3600
    return float(found) if known else USUAL_SILENCE_SECONDS  # type: ignore[arg-type]


def claims_in(listed: Mapping[str, RemoteFile]) -> dict[int, list[str]]:
    """The paths of claims by their numbers, those of one number in order."""
    found: dict[int, list[str]] = {}
    for path in sorted(listed):
        if match := CLAIM.fullmatch(path):
            found.setdefault(int(match[1]), []).append(path)
    return found


def claim_path(turn: int, attempt: str | None) -> str:
    """The path of a claim; in a bucket with the beginning of the attempt's id."""
    return f"owner-{turn:08d}{'' if attempt is None else f'-{attempt}'}.json"
