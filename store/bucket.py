"""One bucket of the Hub as a run's store: files without commits, so snapshots go one by one.

<run>/<attempt>/step-00001000/...     a snapshot; it counts when its manifest.json is there
<run>/<attempt>/metrics/... events.jsonl best.json

A bucket has no atomic change of several files and no compare-and-swap. So each attempt writes below
a folder of its own, and a snapshot's manifest.json comes last.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import constants
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from snapshot.disk.files import (
    LARGEST_STEP,
    MANIFEST,
    manifest_entries,
    manifest_sha256,
    read_json,
)
from snapshot.errors import SnapshotError
from store.errors import (
    BUCKETS,
    HubMissing,
    HubRefused,
    HubUnreachable,
    translate_errors,
)
from store.http import OnHub
from store.latest import Latest, best_in, remote_step
from store.remote import BRANCH, RemoteFile, Transfer
from store.xet import NoXet, is_available

ATTEMPT = r"[0-9a-f]{32}/[0-9a-f]{32}"
"""A run and an attempt."""
FOLDER = re.compile(rf"({ATTEMPT}/step-[0-9]{{8,13}})/[^/]+")
RECORDS = re.compile(rf"({ATTEMPT})/(metrics/from-[0-9]{{8,13}}\.jsonl|events\.jsonl|best\.json)")
BEST = "best.json"
LARGEST_JSON_BYTES = 4 << 20
NEEDS_XET = (
    "hub.bucket needs Xet: install hf-xet, and leave HF_HUB_DISABLE_XET unset. A server without "
    "Xet has no buckets; use hub.repo_id there."
)


class Bucket(OnHub):
    """One bucket. What reads works as with a repo, whose only commit is the present state.

    Every method raises HubError.
    """

    def __init__(self, bucket_id: str, timeout: float = 60.0) -> None:
        """`timeout`: seconds that a request waits for data."""
        super().__init__(bucket_id, timeout, is_bucket=True)

    @property
    def name(self) -> str:
        """What messages call it, as in `hf://buckets/me/run`."""
        return BUCKETS + self.repo_id

    @property
    def key(self) -> str:
        """The configuration key and value that name it."""
        return f"hub.bucket={self.repo_id}"

    def create(self, private: bool) -> None:
        """Create the bucket if it does not exist."""
        with translate_errors(self.name, BRANCH):
            self._api.create_bucket(self.repo_id, private=private, exist_ok=True)

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

    def folders(self, files: Iterable[str], latest: Latest | None) -> list[str]:
        """The whole snapshots of the run of `latest`, of all its attempts, the newest first."""
        found = whole_snapshots(files)
        return [folder for folder in found if latest is None or run_of(folder) == latest.run_id]

    def foreign_file(self, files: Iterable[str]) -> str | None:
        """A file that no run uploaded."""
        known = (FOLDER, RECORDS)
        return next((p for p in sorted(files) if not any(one.fullmatch(p) for one in known)), None)

    def latest(self, commit: str, files: Mapping[str, RemoteFile]) -> Latest | None:
        """The newest whole snapshot, as `latest.json` of a repo names it.

        Raises SnapshotError if it has no manifest of this project.
        """
        for folder in whole_snapshots(files)[:1]:
            try:
                return self._described(commit, files, folder)
            except SnapshotError:  # perhaps damaged in transit
                return self._described(commit, files, folder)
        return None

    def _described(self, commit: str, files: Mapping[str, RemoteFile], folder: str) -> Latest:
        run, attempt, _ = folder.split("/")
        wanted = (f"{folder}/{MANIFEST}", f"{run}/{attempt}/{BEST}")
        small = {path: files[path] for path in wanted if path in files}
        if any(file.size > LARGEST_JSON_BYTES for file in small.values()):
            raise SnapshotError(f"{folder} of {self.name} has a file that is too large")
        with TemporaryDirectory() as place:
            self.download_all(commit, small, Path(place))
            try:
                manifest_entries(Path(place) / folder)
            except SnapshotError as error:
                raise SnapshotError(str(error).replace(place, self.name)) from error
            digest = manifest_sha256(Path(place) / folder)
            best = None
            with suppress(SnapshotError):
                best = best_in(read_json(Path(place) / run / attempt / BEST))
        latest = Latest(run, attempt, remote_step(folder), folder, digest, 0, *(best or (0, None)))
        steps = {remote_step(one) for one in self.folders(files, latest)}
        return latest if latest.best_step in steps else latest.without_best()

    def attempt_prefix(self, folder: str) -> str:
        """`<run>/<attempt>/`: each attempt has a folder of its own."""
        return f"{folder.rpartition('/')[0]}/"

    def read(self, commit: str, path: str, most: int) -> bytes:
        """A small file, of which at most `most` bytes are read. Raises OSError, too."""
        with (
            TemporaryDirectory() as folder,
            open(self.download("", path, Path(folder)), "rb") as file,
        ):
            return file.read(most)

    def download(
        self,
        commit: str,
        path: str,
        folder: Path | None,
        again: bool = False,
    ) -> Path:
        """Download a file to `folder`, under its own path."""
        assert folder is not None, "a bucket has no cache"
        found = self.files()
        if path not in found:
            raise SnapshotError(f"{path} is not in the bucket {self.repo_id} any more")
        self.download_all(commit, {path: found[path]}, folder)
        return folder / path

    def download_all(
        self, commit: str, files: Mapping[str, RemoteFile], folder: Path | None, again: bool = False
    ) -> None:
        """Download files to `folder`. Raises OSError, too."""
        assert folder is not None, "a bucket has no cache"
        if not is_available():
            raise HubRefused(NEEDS_XET)
        try:
            self._xet.download_to(folder, files, "")
        except NoXet as error:
            raise HubRefused(f"{NEEDS_XET} ({error})") from error

    def upload(self, files: Mapping[str, Path]) -> tuple[dict[str, RemoteFile], Transfer]:
        """Upload contents for paths, where nothing is to be seen of them until `add`."""
        if not is_available():
            raise HubRefused(NEEDS_XET)
        try:
            sent, transfer = self._xet.upload(list(files.values()))
        except NoXet as error:
            raise HubRefused(f"{NEEDS_XET} ({error})") from error
        return dict(zip(files, sent, strict=True)), transfer

    def add(self, files: Mapping[str, RemoteFile]) -> None:
        """Add uploaded contents at their paths. It may be applied in part."""
        now = int(time.time() * 1000)
        self._batch(
            {"type": "addFile", "path": path, "xetHash": file.xet_hash, "mtime": now}
            for path, file in files.items()
        )

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


def folders_in_bucket(paths: Iterable[str]) -> set[str]:
    """The folders of snapshots among a bucket's paths, whole or not."""
    return {match[1] for path in paths if (match := FOLDER.fullmatch(path))}


def whole_snapshots(paths: Iterable[str]) -> list[str]:
    """The folders among a bucket's paths that have a manifest, the newest first."""
    folders = folders_in_bucket(path for path in paths if path.endswith(f"/{MANIFEST}"))
    usable = (folder for folder in folders if remote_step(folder) <= LARGEST_STEP)
    return sorted(usable, key=lambda folder: (remote_step(folder), folder), reverse=True)


def run_of(folder: str) -> str:
    """The run of `<run>/<attempt>/step-00000100`."""
    return folder.partition("/")[0]
