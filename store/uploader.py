"""Background uploads: one thread, whose errors never reach the training loop.

At most one upload is in flight and at most one waits, the newest. The local snapshot folders are
the spool: what was not uploaded stays there, and the next start uploads it first.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub.utils import disable_progress_bars

from snapshot.disk.folder import MANIFEST
from snapshot.errors import SnapshotError
from store.attempt import Attempt, Best, Card, Upload, UploadTarget
from store.errors import StoreError, StoreMoved, StoreRefused
from store.fence import Fenced
from store.store import Transfer

FIRST_DELAY_SECONDS = 1.0
LONGEST_DELAY_SECONDS = 3600.0
REPROBE_SECONDS = 600.0
"""After a refusal: it lasts until somebody changes something, and no event reports that."""
FLUSH_DELAY_SECONDS = 5.0
"""The longest delay while the end of the run waits."""
JITTER = random.Random()
"""Of this thread: the global generator belongs to the training."""


@dataclass(frozen=True)
class UploadStatus:
    """How far the store lags behind a run."""

    step: int | None
    """The newest step there; None if it has none, or if that is unknown."""
    age_seconds: float | None
    """Seconds since the snapshot of that step was queued."""
    failure: StoreError | None
    """Why the last upload failed; None if it succeeded."""
    off: bool
    """Whether uploads have ended for good."""
    was_read: bool = True
    """Whether the store has been read at least once."""
    sent: Transfer = field(default_factory=Transfer)
    """What the uploads of this attempt have sent."""

    @property
    def failure_text(self) -> str | None:
        """The message of `failure`."""
        return None if self.failure is None else str(self.failure)

    def as_words(self) -> str:
        """For the progress line: 'hub at step 40, 1:30 old, last error: HTTP 503'."""
        words = "hub has none yet" if self.was_read else "hub not reached yet"
        if self.step is not None:
            words = f"hub at step {self.step}"
        if self.off:
            return f"{words}, uploads off"
        if self.age_seconds is not None:
            seconds = int(self.age_seconds)
            words += f", {seconds // 60}:{seconds % 60:02d} old"
        return words if self.failure is None else f"{words}, last error: {self.failure.short}"


class Uploader:
    """Receives the finished snapshots of one attempt and uploads the newest."""

    def __init__(self, target: UploadTarget) -> None:
        """Start the thread."""
        self._store, self._policy = target.store, target.policy
        self._attempt = Attempt(target)
        self._changed = threading.Condition()
        self._waiting: list[Upload] = []
        self._in_flight: Upload | None = None
        self._flushing = False
        """Whether the end of the run waits for uploads."""
        self._is_last_try = self._refused_while_flushing = False
        """Whether the newest try began in a flush, and whether it was refused."""
        self._off = False
        self._failure: StoreError | None = None
        self._delay = FIRST_DELAY_SECONDS
        self._warned: set[str] = set()
        """Kinds of failures that were reported since the last upload."""
        self._step = None if target.known_latest is None else target.known_latest.step
        self._queued_at: dict[int, float] = {}
        self._last_commit = -math.inf
        self._messages: list[str] = []
        self._sent = Transfer()
        disable_progress_bars()  # those of the Hub client would break our progress line
        threading.Thread(target=self._work, name="uploader", daemon=True).start()

    def offer(self, folder: Path, card: Card, best: Best | None = None) -> None:
        """Queue a finished snapshot. It replaces one that still waits, but no milestone."""
        with self._changed:
            if not self._off:
                upload = Upload(folder, card, best)
                self._waiting = [*filter(self._is_milestone, self._waiting), upload]
                self._queued_at[upload.step] = time.monotonic()
                self._changed.notify_all()

    def pending_folders(self) -> set[Path]:
        """Snapshot folders that must stay until they are uploaded."""
        with self._changed:
            uploads = [upload for upload in (*self._waiting, self._in_flight) if upload]
            best = {upload.best.folder for upload in uploads if upload.best}
            return {folder for folder in best if folder} | {upload.folder for upload in uploads}

    def status(self) -> UploadStatus:
        """How far the store lags behind."""
        with self._changed:
            since = self._queued_at.get(self._step) if self._step is not None else None
            age = None if since is None else time.monotonic() - since
            was_read = self._attempt.was_read
            return UploadStatus(self._step, age, self._failure, self._off, was_read, self._sent)

    def messages(self) -> list[str]:
        """Sentences for the user since the last call."""
        with self._changed:
            messages, self._messages = self._messages, []
            return messages

    def flush(self, seconds: float, more: Callable[[], bool] = lambda: True) -> bool:
        """Wait at most `seconds` until everything is uploaded; whether it is. Raises nothing.

        `more` is called twice a second; the wait ends when it returns False.
        """
        end = time.monotonic() + seconds
        with self._changed:
            self._flushing = True
            self._changed.notify_all()
            while not (self._refused_while_flushing or self._is_done()):
                left = end - time.monotonic()
                if left <= 0 or not more():
                    break
                self._changed.wait(min(left, 0.5))
            return self._is_done()

    def _is_done(self) -> bool:
        return not self._waiting and self._in_flight is None

    def _is_milestone(self, upload: Upload) -> bool:
        return self._policy.is_milestone(upload.step)

    def _work(self) -> None:
        """Upload until this attempt is fenced."""
        while not self._off:
            with suppress(BaseException):  # any at all (hf_xet can panic): none may end the thread
                try:
                    failure = self._upload_next()
                except BaseException as error:
                    self._try_later(error)
                else:
                    self._end_upload(failure)

    def _end_upload(self, failure: StoreError | None) -> None:
        """The snapshot is uploaded, or will not be."""
        with self._changed:
            self._failure, self._in_flight = failure, None
            self._refused_while_flushing, self._delay = False, FIRST_DELAY_SECONDS
            self._changed.notify_all()

    def _upload_next(self) -> StoreError | None:
        """Wait for a snapshot and upload it; why it will not be uploaded, if so.

        Raises any error after which it is tried again.
        """
        upload = self._next()
        try:
            sent = self._attempt.upload(upload)
        except Fenced as error:
            self._notify(str(error))
            with self._changed:
                self._off, self._waiting = True, []
            return StoreError(str(error), "another uploads")
        except (SnapshotError, OSError) as error:
            # Full temporary folders and the like may pass: the snapshot itself is still there.
            is_about_disk = isinstance(error, OSError) or isinstance(error.__cause__, OSError)
            if is_about_disk and (upload.folder / MANIFEST).is_file():
                raise
            self._notify(f"step {upload.step} is not uploaded: {error}. The next one is tried.")
            return StoreError(str(error), f"step {upload.step} not readable")
        finally:
            while self._store.notes:
                self._notify(self._store.notes.pop(0))
        self._note_uploaded(upload, sent)
        return None

    def _try_later(self, error: BaseException) -> None:
        """Wait after an error; the second in turn is reported, and one that lasts at once."""
        if self._is_done():  # nothing waits, so nothing has failed
            self._pause(FIRST_DELAY_SECONDS)
            return
        if not isinstance(error, StoreError):
            error = StoreError(repr(error), type(error).__name__)
        is_refusal, is_first = isinstance(error, StoreRefused), self._failure is None
        with self._changed:
            self._failure = error
            self._refused_while_flushing = self._is_last_try and is_refusal
            upload = self._in_flight or self._waiting[-1]
            self._changed.notify_all()
        unharmed = f"Training continues; snapshots stay in {upload.folder.parent}"
        if is_refusal:
            every = f"the upload is tried every {REPROBE_SECONDS / 60:.0f} minutes"
            self._warn_once(error, f"uploads wait: {error} {unharmed}, and {every}.")
            self._pause(REPROBE_SECONDS)
            return
        if not is_first and not isinstance(error, StoreMoved):
            reason = str(error).rstrip(".")
            self._warn_once(error, f"uploads wait: {reason}. {unharmed}; retries continue.")
        pause = max(self._delay * JITTER.uniform(0.5, 1.5), error.retry_after or 0.0)
        self._delay = min(2 * self._delay, LONGEST_DELAY_SECONDS)
        self._pause(min(pause, LONGEST_DELAY_SECONDS))

    def _note_uploaded(self, upload: Upload, sent: Transfer) -> None:
        with self._changed:
            self._sent += sent
            self._warned.clear()
            self._last_commit = time.monotonic()
            self._step = upload.step
            self._queued_at = {
                step: since for step, since in self._queued_at.items() if step >= upload.step
            }

    def _next(self) -> Upload:
        """Wait for the next snapshot to upload: the one that failed, unless a newer one waits.

        Milestones are uploaded in any case, in their order.
        """
        with self._changed:
            while (left := self._seconds_until_upload()) > 0:
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            if self._waiting and not (self._in_flight and self._is_milestone(self._in_flight)):
                self._in_flight = self._waiting.pop(0)
            self._is_last_try = self._flushing
            assert self._in_flight is not None
            return self._in_flight

    def _seconds_until_upload(self) -> float:
        """Infinite if no snapshot waits."""
        if self._is_done():
            return math.inf
        if self._flushing:
            return 0.0
        return self._last_commit + self._policy.min_interval - time.monotonic()

    def _pause(self, seconds: float) -> None:
        """Wait, but only briefly while the end of the run waits."""
        with self._changed:
            if self._flushing:
                self._changed.wait_for(lambda: False, min(seconds, FLUSH_DELAY_SECONDS))
            else:
                self._changed.wait_for(lambda: self._flushing, seconds)

    def _warn_once(self, error: StoreError, text: str) -> None:
        if error.short not in self._warned:
            self._warned.add(error.short)
            self._notify(text)

    def _notify(self, text: str) -> None:
        with self._changed:
            self._messages.append(text)
