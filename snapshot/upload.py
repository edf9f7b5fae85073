"""Uploading beside training: one background thread, of which no error ever reaches the loop.

One upload is in flight and one waits, the newest. The local snapshot folders are the spool: what
did not go stays there, and goes first at the next start.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from huggingface_hub.utils import disable_progress_bars

from snapshot.behind import Uploaded
from snapshot.errors import SnapshotError
from snapshot.fetch import foreign_content, look_at
from snapshot.hub import Hub, Latest
from snapshot.hub_errors import (
    HubError,
    HubMoved,
    HubNoRevision,
    HubRefused,
    HubUnknown,
    HubUnreachable,
)
from snapshot.publish import Card, Policy, Upload, described, publish

FIRST_DELAY_SECONDS = 1.0
LONGEST_DELAY_SECONDS = 3600.0
REPROBE_SECONDS = 600.0
"""After a refusal: somebody must change something, and will not say when."""
FLUSH_DELAY_SECONDS = 5.0
"""The longest delay while the end of the run waits."""


class _Fenced(Exception):
    """Another attempt has the repo."""


class Uploader:
    """Takes finished snapshots of one attempt and brings the newest to the Hub."""

    def __init__(
        self,
        hub: Hub,
        policy: Policy,
        run_id: str,
        attempt_id: str,
        seen: Latest | None,
        ended: Collection[str],
        unknown: bool = False,
    ) -> None:
        """Begin.

        `seen` is the repo's latest.json when this attempt started; `ended` are earlier attempts,
        which are known to be over; with `unknown` the Hub could not be asked, and the repo may not
        even exist.
        """
        self._hub, self._policy = hub, policy
        self._run_id, self._attempt_id = run_id, attempt_id
        self._seen, self._ended = seen, frozenset(ended)
        self._unknown = unknown
        self._head: str | None = None
        """The commit of our last upload."""
        self._latest = seen
        self._commits = seen.commits if seen is not None else 0
        self._can_squash = True
        self._may_take = policy.takeover
        """Once: afterwards another's takeover ends this attempt's uploads as well."""
        self._changed = threading.Condition()
        self._waiting: Upload | None = None
        self._in_flight: Upload | None = None
        self._flushing = False
        self._refused_at_the_end = False
        self._off = False
        self._fault: str | None = None
        self._step = seen.step if seen is not None else None
        self._handed_over: dict[int, float] = {}
        self._last_commit = -float("inf")
        self._messages: list[str] = []
        disable_progress_bars()  # of the client's: they would tear ours
        self._thread = threading.Thread(target=self._work, name="uploader", daemon=True)
        self._thread.start()

    def offer(self, folder: Path, card: Card) -> None:
        """Hand over a finished snapshot. It takes the place of one that still waits."""
        with self._changed:
            if not self._off:
                self._waiting = Upload(folder, card)
                self._handed_over[self._waiting.step] = time.monotonic()
                self._changed.notify_all()

    def needed(self) -> set[Path]:
        """Folders that must stay until they are uploaded."""
        with self._changed:
            return {upload.folder for upload in (self._waiting, self._in_flight) if upload}

    def status(self) -> Uploaded:
        """How far the Hub is behind."""
        with self._changed:
            since = self._handed_over.get(self._step) if self._step is not None else None
            seconds = None if since is None else time.monotonic() - since
            return Uploaded(self._step, seconds, self._fault, self._off)

    def messages(self) -> list[str]:
        """Sentences for the person in front of the run, since the last call."""
        with self._changed:
            said, self._messages = self._messages, []
            return said

    def flush(self, seconds: float, more: Callable[[], bool] = lambda: True) -> bool:
        """Wait until all is uploaded, so long at most; whether it is. Nothing is raised.

        `more`, asked twice a second, says whether to go on waiting.
        """
        end = time.monotonic() + seconds
        with self._changed:
            self._flushing = True
            self._changed.notify_all()
            while not (self._refused_at_the_end or self._is_done()):
                left = end - time.monotonic()
                if left <= 0 or not more():
                    break
                self._changed.wait(min(left, 0.5))
            return self._is_done()

    def _is_done(self) -> bool:
        return self._waiting is None and self._in_flight is None

    def _work(self) -> None:
        delay = FIRST_DELAY_SECONDS
        while not self._off:
            upload = self._next()
            pause: float | None = None
            fault: str | None = None
            flushing = self._flushing
            try:
                self._try(upload)
            except _Fenced as error:
                self._stop(str(error))
            except (SnapshotError, OSError) as error:
                # Of this folder; the next snapshot is another. The network raises HubError.
                self._say(f"step {upload.step} is not uploaded: {error}. The next one will be.")
                fault = str(error)
            except HubRefused as error:
                if self._fault != str(error):
                    self._say(
                        f"uploads wait: {error} Training goes on; snapshots stay in "
                        f"{upload.folder.parent}, and a try is made every "
                        f"{REPROBE_SECONDS / 60:.0f} minutes."
                    )
                fault, pause = str(error), REPROBE_SECONDS
                with self._changed:
                    self._refused_at_the_end = flushing
            except BaseException as error:  # whatever it is (hf_xet can panic), no run is worth it
                asked = error.retry_after if isinstance(error, HubUnreachable) else None
                fault = str(error) if isinstance(error, HubError) else f"{error!r}"
                pause = max(delay * random.uniform(0.5, 1.5), asked or 0.0)
                pause = min(pause, LONGEST_DELAY_SECONDS)
                delay = min(2 * delay, LONGEST_DELAY_SECONDS)
            if pause is None:
                delay = FIRST_DELAY_SECONDS
            with self._changed:
                self._fault = fault
                if pause is None:
                    self._in_flight = None
                self._changed.notify_all()
            if pause is not None:
                self._pause(pause)

    def _next(self) -> Upload:
        """The newest snapshot that waits, or the one whose upload failed; waits for one."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._in_flight)
            ready = self._last_commit + self._policy.min_interval
            while not self._flushing and (left := ready - time.monotonic()) > 0:
                self._changed.wait(left)
            if self._waiting is not None:
                self._in_flight, self._waiting = self._waiting, None
            assert self._in_flight is not None
            return self._in_flight

    def _pause(self, seconds: float) -> None:
        """Wait, but not for long once the end of the run waits too."""
        with self._changed:
            if self._flushing:
                self._changed.wait_for(lambda: False, min(seconds, FLUSH_DELAY_SECONDS))
            else:
                self._changed.wait_for(lambda: self._flushing, seconds)

    def _try(self, upload: Upload) -> None:
        """Upload a snapshot, unless it is there. Raises what `_work` tells apart."""
        try:
            self._bring(upload)
        except HubNoRevision as error:  # a replica that is behind, or a repo made anew
            self._head = None
            raise HubMoved(str(error)) from error
        except HubError:
            self._head = None  # the head that is read next is believed
            raise

    def _bring(self, upload: Upload) -> None:
        if self._unknown:
            self._hub.create(self._policy.private)
            if foreign := look_at(self._hub).holds_something_else():
                raise _Fenced(foreign_content(self._hub, foreign))
            self._unknown = False
        latest = described(upload, self._run_id, self._attempt_id, self._commits + 1)
        parent, before = self._parent()
        if before is None or replace(before, commits=latest.commits) != latest:
            self._head = publish(self._hub, upload, latest, before, self._policy.keep, parent)
        else:  # the answer to its commit was lost
            self._head = parent
        self._commits, self._latest, self._may_take = latest.commits, latest, False
        with self._changed:
            self._last_commit = time.monotonic()
            self._step = upload.step
            for step in [step for step in self._handed_over if step < upload.step]:
                del self._handed_over[step]
        if self._can_squash and self._commits >= self._policy.squash_every:
            self._squash()

    def _parent(self) -> tuple[str, Latest | None]:
        """The commit to build on, and its latest.json.

        Raises _Fenced when the repo is another's.
        """
        head, private = self._hub.head()
        if self._policy.private and not private:
            raise HubRefused(
                f"{self._hub.repo_id} has become public, and hub.private=true. Make it private, or "
                "start with hub.private=false."
            )
        if head == self._head:
            return head, self._latest
        try:
            found = self._hub.latest(head)
        except SnapshotError:
            found = None  # not what this project writes: nobody's
        ours = {self._attempt_id, *self._ended}
        if not (found is None or found.attempt_id in ours or found == self._seen):
            if not self._may_take:
                raise _Fenced(self._whose(found))
            self._seen = found  # whoever reads it later is behind
            return head, found
        if self._head is not None and self._is_older(found):
            return self._head, self._latest  # a read that is behind
        return head, found

    def _is_older(self, found: Latest | None) -> bool:
        """Whether what a read of the head shows is from before our last upload."""
        assert self._latest is not None
        if found is None or found == self._seen or found.attempt_id in self._ended:
            return True
        return found.attempt_id == self._attempt_id and found.step < self._latest.step

    def _whose(self, found: Latest) -> str:
        other = "another run" if found.run_id != self._run_id else "another attempt of this run"
        return (
            f"{other} has uploaded step {found.step} to {self._hub.repo_id}; this one uploads "
            "nothing more. Training goes on, with local snapshots. To take the repo back, start "
            "again with hub.takeover=true; to keep both, give one of them another hub.repo_id."
        )

    def _squash(self) -> None:
        """Forget the history; a Hub that cannot is not asked again."""
        try:
            self._hub.squash(f"Snapshot of step {self._step}; earlier history forgotten")
            self._commits, self._head = 0, None
        except HubUnknown:
            self._can_squash = False
        except HubError:
            pass  # it stays due

    def _stop(self, reason: str) -> None:
        self._say(reason)
        with self._changed:
            self._off = True
            self._waiting = self._in_flight = None
            self._changed.notify_all()

    def _say(self, text: str) -> None:
        with self._changed:
            self._messages.append(text)
