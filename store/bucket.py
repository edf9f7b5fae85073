"""A bucket of the Hub as a store of files."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import BinaryIO

from huggingface_hub.utils._xet import abort_xet_session

from common.hub_client import hub_api, open_xet_session
from store.errors import NoFile, StoreError, translate
from store.file_system import FileSystem
from store.store import BRANCH, PREFIX

BUCKETS = f"{PREFIX}buckets/"
"""How its URL begins."""
READ_AHEAD_BYTES = 64 << 10
"""Its file system reads so much more than it is asked for."""


class Bucket(FileSystem):
    """A bucket, or a folder in one. Every method raises StoreError."""

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        """`url`: `hf://buckets/owner/name`; `timeout`: seconds that a request waits for data."""
        self._api = hub_api(timeout)
        super().__init__(url, timeout, block_size=READ_AHEAD_BYTES)
        self._id = "/".join(self._root.split("/")[1:3])

    def is_private(self) -> bool:
        """Whether only its owner can see it."""
        return bool(self._ask(partial(self._api.bucket_info, self._id)).private)

    def create(self, private: bool) -> None:
        """Create the bucket, if it does not exist."""
        self._ask(partial(self._api.create_bucket, self._id, private=private, exist_ok=True))

    def remove(self) -> None:
        """Remove the bucket, or the folder in one."""
        if self._root != f"buckets/{self._id}":
            super().remove()
            return
        with suppress(NoFile):
            self._ask(partial(self._api.delete_bucket, self._id, missing_ok=True))

    def write(self, path: str, source: BinaryIO) -> str:
        """Write a file; returns its SHA-256."""
        open_xet_session()
        return super().write(path, source)

    def translated(self, error: Exception) -> StoreError:
        """The error of the right kind."""
        if isinstance(error, TimeoutError):
            abort_xet_session()  # an upload through Xet has no limit of its own
            return super().translated(error)
        if isinstance(error, FileNotFoundError):
            return super().translated(error)
        return translate(error, self.name, BRANCH, NoFile)
