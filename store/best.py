"""The best snapshot of an upload, verified: a damaged one never delays the newest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from snapshot.disk.files import verify
from snapshot.errors import SnapshotError
from store.remote import Upload


class BestCheck:
    """Verifies each best snapshot once. Not thread-safe."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        """`notify` receives sentences for the user."""
        self._notify = notify
        self._is_whole: dict[Path, bool] = {}
        """The best snapshot that was verified last."""

    def checked(self, upload: Upload) -> Upload:
        """The upload, without its best snapshot if that is damaged."""
        folder = None if upload.best is None else upload.best.folder
        if folder is None:
            return upload
        if folder not in self._is_whole:
            self._is_whole = {folder: self._verify(folder)}
        return upload if self._is_whole[folder] else replace(upload, best=None)

    def _verify(self, folder: Path) -> bool:
        try:
            verify(folder)
        except SnapshotError as error:
            self._notify(f"the best snapshot is not uploaded: {str(error).rstrip('.')}.")
            return False
        return True
