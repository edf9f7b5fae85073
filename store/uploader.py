"""Background uploads: one thread, whose errors never reach the training loop.

At most one upload is in flight and at most one waits, the newest. The local snapshot folders are
the spool: what was not uploaded stays there, and the next start uploads it first.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.utils import disable_progress_bars

from snapshot.disk.folder import MANIFEST
from snapshot.errors import SnapshotError
from store.attempt import Attempt, Best, Card, Upload, UploadTarget
from store.errors import StoreError, StoreMoved, StoreRefused
from store.fence import Fenced

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
        self._store, self._target = target.store, target
        self._attempt = Attempt(target)
        self._changed = threading.Condition()
        self._queue: list[Upload] = []
        """The snapshots to upload, in their order (see `_drop_older`)."""
        self._in_flight: Upload | None = None
        self._flushing = False
        """Whether the end of the run waits for uploads."""
        self._is_last_try = self._has_given_up = False
        """Whether the newest try began in a flush, and whether it was refused."""
        self._off = False
        self._failure: StoreError | None = None
        self._delay = FIRST_DELAY_SECONDS
        self._warned: set[str] = set()
        """Kinds of failures that were reported since the last upload."""
        self._step = None if target.known_latest is None else target.known_latest.step
        self._queued_at: float | None = None
        """When the snapshot of that step was queued."""
        self._next_upload_at = 0.0
        self._messages: list[str] = []
        disable_progress_bars()  # those of the Hub client would break our progress line
        threading.Thread(target=self._work, name="uploader", daemon=True).start()

    def offer(self, folder: Path, card: Card, best: Best | None = None) -> None:
        """Queue a finished snapshot. It replaces one that still waits, unless that must stay."""
        with self._changed:
            if not self._off:
                self._queue.append(Upload(folder, card, best, time.monotonic()))
                self._drop_older()
                self._changed.notify_all()

    def _drop_older(self) -> None:
        """Leave the newest in the queue, what is in flight, milestones and the best snapshot."""
        newest = self._queue[-1]
        best = None if newest.best is None else newest.best.step
        self._queue = [
            one
            for one in self._queue
            if one in (newest, self._in_flight)
            or one.step == best
            or self._target.is_milestone(one.step)
        ]

    def pending_folders(self) -> set[Path]:
        """Snapshot folders that must stay until they are uploaded."""
        with self._changed:
            return {one.folder for one in self._queue}

    def status(self) -> UploadStatus:
        """How far the store lags behind."""
        with self._changed:
            age = None if self._queued_at is None else time.monotonic() - self._queued_at
            was_read = self._attempt.was_read
            return UploadStatus(self._step, age, self._failure, self._off, was_read)

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
            while self._queue and not self._has_given_up:
                left = end - time.monotonic()
                if left <= 0 or not more():
                    break
                self._changed.wait(min(left, 0.5))
            return not self._queue

    def _work(self) -> None:
        """Upload until this attempt is fenced."""
        while not self._off:
            try:
                self._upload_next()
            except BaseException:  # any at all (hf_xet can panic): none may end the thread
                time.sleep(FIRST_DELAY_SECONDS)

    def _upload_next(self) -> None:
        """Wait for a snapshot, upload it, and wait after an error."""
        upload = self._next()
        try:
            self._attempt.upload(upload)
        except Fenced as error:
            self._notify(str(error))
            with self._changed:
                self._off, self._queue = True, []
            self._end(upload, StoreError(str(error), "another uploads"))
        except BaseException as error:
            if _is_lost(upload, error):
                self._notify(f"step {upload.step} is not uploaded: {error}. The next one is tried.")
                short = f"step {upload.step} not readable"
                self._end(upload, StoreError(str(error), short))
            else:
                self._try_later(upload, error)
        else:
            with self._changed:
                self._step, self._queued_at = upload.step, upload.queued_at
                self._next_upload_at = time.monotonic() + self._target.min_interval
                self._warned.clear()
            self._end(upload, None)
        finally:
            while self._store.notes:
                self._notify(self._store.notes.pop(0))

    def _next(self) -> Upload:
        """Wait for the next snapshot to upload; without milestones, the newest."""
        with self._changed:
            while not self._queue:
                self._changed.wait()
            while not self._flushing and (left := self._next_upload_at - time.monotonic()) > 0:
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            self._in_flight = None  # one that failed gives way to a newer one
            self._drop_older()
            self._in_flight, self._is_last_try = self._queue[0], self._flushing
            return self._in_flight

    def _end(self, upload: Upload, failure: StoreError | None) -> None:
        """The snapshot is uploaded, or will not be."""
        with self._changed:
            self._queue = [one for one in self._queue if one is not upload]
            self._failure, self._in_flight = failure, None
            self._has_given_up, self._delay = False, FIRST_DELAY_SECONDS
            self._changed.notify_all()

    def _try_later(self, upload: Upload, error: BaseException) -> None:
        """Wait after an error; the second in turn is reported, and one that lasts at once."""
        if not isinstance(error, StoreError):
            error = StoreError(repr(error), type(error).__name__)
        lasts, is_first = isinstance(error, StoreRefused), self._failure is None
        with self._changed:
            self._failure = error
            self._has_given_up = self._is_last_try and lasts
            self._changed.notify_all()
        if lasts or not (is_first or isinstance(error, StoreMoved)):
            again = f"every {REPROBE_SECONDS / 60:.0f} minutes" if lasts else "again"
            if error.short not in self._warned:
                self._warned.add(error.short)
                self._notify(
                    f"uploads wait: {str(error).rstrip('.')}. Training continues; snapshots stay "
                    f"in {upload.folder.parent}, and the upload is tried {again}."
                )
        pause = max(self._delay * JITTER.uniform(0.5, 1.5), error.retry_after or 0.0)
        self._delay = min(2 * self._delay, LONGEST_DELAY_SECONDS)
        self._pause(REPROBE_SECONDS if lasts else min(pause, LONGEST_DELAY_SECONDS))

    def _pause(self, seconds: float) -> None:
        """Wait, but only briefly while the end of the run waits."""
        with self._changed:
            if self._flushing:
                self._changed.wait_for(lambda: False, min(seconds, FLUSH_DELAY_SECONDS))
            else:
                self._changed.wait_for(lambda: self._flushing, seconds)

    def _notify(self, text: str) -> None:
        with self._changed:
            self._messages.append(text)


def _is_lost(upload: Upload, error: BaseException) -> bool:
    """Whether the snapshot itself is damaged or gone.

    Full temporary folders and the like may pass: the snapshot is still there then.
    """
    if not isinstance(error, SnapshotError | OSError):
        return False
    is_of_disk = isinstance(error, OSError) or isinstance(error.__cause__, OSError)
    return not (is_of_disk and (upload.folder / MANIFEST).is_file())
