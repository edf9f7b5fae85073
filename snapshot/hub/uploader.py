"""Uploading beside training: one background thread, of which no error ever reaches the loop.

One upload is in flight and one waits, the newest. The local snapshot folders are the spool: what
did not go stays there, and goes first at the next start.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from huggingface_hub.utils import disable_progress_bars

from snapshot.errors import SnapshotError
from snapshot.hub.attempt import Attempt, Fenced
from snapshot.hub.client import Hub
from snapshot.hub.errors import HubError, HubMoved, HubRefused, HubUnreachable
from snapshot.hub.latest import Latest
from snapshot.hub.publish import Card, Policy, Upload
from snapshot.hub.status import Fault, UploadStatus

FIRST_DELAY_SECONDS = 1.0
LONGEST_DELAY_SECONDS = 3600.0
REPROBE_SECONDS = 600.0
"""After a refusal: somebody must change something, and will not say when."""
FLUSH_DELAY_SECONDS = 5.0
"""The longest delay while the end of the run waits."""


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
        self._changed = threading.Condition()
        self._waiting: Upload | None = None
        self._in_flight: Upload | None = None
        self._flushing = False
        self._refused_at_the_end = False
        self._off = False
        self._fault: Fault | None = None
        self._warned: set[str] = set()
        """Kinds of faults that were said since the last upload."""
        self._step = seen.step if seen is not None else None
        self._handed_over: dict[int, float] = {}
        self._last_commit = -float("inf")
        self._messages: list[str] = []
        self._attempt = Attempt(
            hub, policy, run_id, attempt_id, seen, ended, unknown, say=self._say
        )
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

    def status(self) -> UploadStatus:
        """How far the Hub is behind."""
        with self._changed:
            since = self._handed_over.get(self._step) if self._step is not None else None
            seconds = None if since is None else time.monotonic() - since
            return UploadStatus(self._step, seconds, self._fault, self._off, self._attempt.is_known)

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
            flushing = self._flushing
            fault, pause = self._tried(upload, delay)
            delay = FIRST_DELAY_SECONDS if pause is None else min(2 * delay, LONGEST_DELAY_SECONDS)
            while self._hub.notes:
                self._say(self._hub.notes.pop(0))
            with self._changed:
                self._fault = fault
                self._refused_at_the_end = flushing and fault is not None and fault.lasting
                if pause is None:
                    self._in_flight = None
                self._changed.notify_all()
            if pause is not None:
                self._pause(pause)

    def _tried(self, upload: Upload, delay: float) -> tuple[Fault | None, float | None]:
        """Upload a snapshot. What went wrong, and the seconds until the next try, if there is one.

        `delay`: of the usual failure.
        """
        stay = f"Training goes on; snapshots stay in {upload.folder.parent}"
        try:
            self._attempt.bring(upload)
        except Fenced as error:
            self._stop(str(error))
            return Fault(str(error), "another has the repo"), None
        except (SnapshotError, OSError) as error:
            # Of this folder; the next snapshot is another. The network raises HubError.
            self._say(f"step {upload.step} is not uploaded: {error}. The next one will be.")
            return Fault(str(error), f"step {upload.step} not readable"), None
        except HubRefused as error:
            tries = f"a try is made every {REPROBE_SECONDS / 60:.0f} minutes"
            self._warn_once(error.short, f"uploads wait: {error} {stay}, and {tries}.")
            return Fault(str(error), error.short, lasting=True), REPROBE_SECONDS
        except BaseException as error:  # whatever it is (hf_xet can panic), no run is worth it
            fault = Fault(repr(error), type(error).__name__)
            if isinstance(error, HubError):
                fault = Fault(str(error), error.short)
            if self._fault is not None and not isinstance(error, HubMoved):  # not the first time
                sentence = fault.sentence.rstrip(".")
                self._warn_once(fault.short, f"uploads wait: {sentence}. {stay}; tries go on.")
            asked = error.retry_after if isinstance(error, HubUnreachable) else None
            pause = max(delay * random.uniform(0.5, 1.5), asked or 0.0)
            return fault, min(pause, LONGEST_DELAY_SECONDS)
        self._note_uploaded(upload)
        self._attempt.squash_where_due(upload.step)
        return None, None

    def _note_uploaded(self, upload: Upload) -> None:
        with self._changed:
            self._warned.clear()
            self._last_commit = time.monotonic()
            self._step = upload.step
            for step in [step for step in self._handed_over if step < upload.step]:
                del self._handed_over[step]

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

    def _stop(self, reason: str) -> None:
        self._say(reason)
        with self._changed:
            self._off = True
            self._waiting = self._in_flight = None
            self._changed.notify_all()

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._say(text)

    def _say(self, text: str) -> None:
        with self._changed:
            self._messages.append(text)
