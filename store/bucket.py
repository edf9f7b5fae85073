"""A bucket of the Hub as a store of files. All of its contents are in Xet storage."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from store.errors import (
    BUCKETS,
    HubMissing,
    HubRefused,
    HubUnreachable,
    translate_errors,
)
from store.files import Files
from store.http import OnHub
from store.store import BRANCH, RemoteFile, Transfer
from store.xet import NoXet, is_available

NEEDS_XET = (
    "hub.bucket needs Xet: install hf-xet, and leave HF_HUB_DISABLE_XET unset. A server without "
    "Xet has no buckets; use hub.repo_id there."
)


class Bucket(OnHub, Files):
    """One bucket. Every method raises HubError.

    HfFileSystem can list it, too, but transfers with huggingface_hub's own settings for Xet, under
    which an upload that stalls never ends.
    """

    def __init__(self, bucket_id: str, timeout: float = 60.0) -> None:
        """`timeout`: seconds that a request waits for data."""
        super().__init__(bucket_id, timeout, is_bucket=True)

    @property
    def name(self) -> str:
        """What messages call it, as in `hf://buckets/me/run`."""
        return BUCKETS + self.repo_id

    @property
    def title(self) -> str:
        """What a sentence says of it."""
        return f"the bucket {self.repo_id}"

    @property
    def key(self) -> str:
        """The configuration key and value that name it."""
        return f"hub.bucket={self.repo_id}"

    def create(self, private: bool) -> None:
        """Create the bucket if it does not exist."""
        with translate_errors(self.name, BRANCH):
            self._api.create_bucket(self.repo_id, private=private, exist_ok=True)

    def remove(self) -> None:
        """Remove the bucket, if it exists."""
        with translate_errors(self.name, BRANCH):
            self._api.delete_bucket(self.repo_id, missing_ok=True)

    def head(self, revision: str = BRANCH) -> tuple[str, bool]:
        """An empty text, because there are no commits, and whether the bucket is private."""
        with translate_errors(self.name, BRANCH, HubMissing):
            return "", bool(self._api.bucket_info(self.repo_id).private)

    def files(self, commit: str = "") -> dict[str, RemoteFile]:
        """The present files by path."""
        with translate_errors(self.name, BRANCH, HubMissing):
            entries = list(self._api.list_bucket_tree(self.repo_id, recursive=True))
        return {
            entry.path: RemoteFile(entry.size, None, entry.xet_hash)
            for entry in entries
            if entry.type == "file"
        }

    def download_all(
        self, commit: str, files: Mapping[str, RemoteFile], folder: Path | None, again: bool = False
    ) -> None:
        """Download files to `folder`; those that exist stay. Raises HubError and OSError.

        `commit` and `again` mean nothing here: a bucket has neither commits nor a cache.
        """
        assert folder is not None, "a bucket has no cache"
        if not is_available():
            raise HubRefused(NEEDS_XET)
        try:
            self._xet.download_to(folder, files, "")
        except NoXet as error:
            raise HubRefused(f"{NEEDS_XET} ({error})") from error

    def send(
        self, files: Mapping[str, Path], replaced: Collection[str] = ()
    ) -> tuple[dict[str, RemoteFile], Transfer]:
        """Upload files to their paths. A bucket replaces any that are there."""
        if not is_available():
            raise HubRefused(NEEDS_XET)
        try:
            contents, transfer = self._xet.upload(list(files.values()))
        except NoXet as error:
            raise HubRefused(f"{NEEDS_XET} ({error})") from error
        sent = dict(zip(files, contents, strict=True))
        now = int(time.time() * 1000)
        self._batch(
            {"type": "addFile", "path": path, "xetHash": file.xet_hash, "mtime": now}
            for path, file in sent.items()
        )
        return sent, transfer

    def delete(self, paths: Collection[str]) -> None:
        """Delete files. It may be applied in part."""
        self._batch({"type": "deleteFile", "path": path} for path in paths)

    def _batch(self, operations: Iterable[Mapping[str, object]]) -> None:
        lines = [json.dumps(operation).encode() for operation in operations]
        if not lines:
            return
        url = f"{constants.ENDPOINT}/api/buckets/{self.repo_id}/batch"
        headers = {**build_hf_headers(), "Content-Type": "application/x-ndjson"}
        with translate_errors(self.name, BRANCH):
            response = get_session().post(url, headers=headers, content=b"\n".join(lines))
            failed = response.json().get("failed", []) if response.status_code in (200, 422) else []
            if not failed:
                hf_raise_for_status(response)
        if failed:
            reason = str(failed[0].get("error"))[:100]
            raise HubUnreachable(
                f"the Hub has applied a batch in part ({len(failed)} of {len(lines)} operations "
                f"failed: {reason})",
                "batch in part",
            )
