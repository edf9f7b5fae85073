"""The best snapshot of an upload, verified: a damaged one never delays the newest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from snapshot.disk.files import verify
from snapshot.errors import SnapshotError
from snapshot.hub.publish import Upload


class BestCheck:
    """Verifies each best snapshot once. Not thread-safe."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        """`notify` receives sentences for the user."""
        self._notify = notify
        self._whole: Path | None = None
        """The best snapshot that was verified."""

    def checked(self, upload: Upload) -> Upload:
        """The upload, without its best snapshot if that is damaged."""
        folder = None if upload.best is None else upload.best.folder
        if folder is None or folder == self._whole:
            return upload
        try:
            verify(folder)
        except SnapshotError as error:
            self._notify(f"the best snapshot is not uploaded: {str(error).rstrip('.')}.")
            return replace(upload, best=None)
        self._whole = folder
        return upload
