"""A store of plain files, without commits: a folder of a disk, of S3, of a bucket of the Hub.

snapshots/step-00001000-3f2a1b2c/...    a snapshot, with its attempt's id; whole when it has its
                                        manifest.json
latest.json                             the newest one, its run, attempt and generation
metrics/... events.jsonl                the run's records (store/records.py)

Such a store cannot change several files at once, so the order is what makes an upload safe:
contents, manifest.json, latest.json, then deletions.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping
from hashlib import sha256
from pathlib import Path

from snapshot.disk.folder import MANIFEST, SYSTEM_FILES, entries_in, parse_json
from snapshot.disk.state import STATE, state_in
from snapshot.errors import SnapshotError
from store.latest import FOLDER, LATEST, Latest, folders_in, remote_step
from store.store import RemoteFile, Store, Transfer

PARTIAL = ".partial-"
"""On a disk, how a file is called until all of it is there."""
RECORDS = re.compile(r"metrics/from-[0-9]{8,13}\.jsonl|events\.jsonl|proof\.json")
LARGEST_JSON_BYTES = 4 << 20
PARTS = re.compile(r"(snapshots/)?\.partial-[0-9a-z]{1,8}")


class Files(Store):
    """A store of files, as a start reads it; its only commit is the present state.

    Every method raises StoreError.
    """

    @property
    @abstractmethod
    def title(self) -> str:
        """What a sentence says of it, as in 'the bucket me/run'."""

    @abstractmethod
    def send(
        self, files: Mapping[str, Path], replaced: Collection[str] = ()
    ) -> tuple[dict[str, RemoteFile], Transfer]:
        """Upload files to their paths; returns each as it is there, with the SHA-256 of what went.

        Only `replaced` paths may exist. It may be applied in part.
        """

    @abstractmethod
    def put(self, files: Mapping[str, bytes]) -> None:
        """Write small files, which may exist, in that order."""

    @abstractmethod
    def delete(self, paths: Collection[str]) -> None:
        """Delete files. It may be applied in part.

        Raises StoreRefused for a file that the store keeps: the others are still deleted later.
        """

    def foreign_file(self, files: Iterable[str]) -> str | None:
        """A file that no run uploaded, and no file manager created.

        Records count as a run's only beside its snapshots or latest.json.
        """
        known = {path for path in files if FOLDER.fullmatch(path) or path == LATEST}
        for path in sorted(set(files) - known):
            is_known = PARTS.fullmatch(path) or (known and RECORDS.fullmatch(path))
            if not (is_known or SYSTEM_FILES.fullmatch(path.rpartition("/")[2])):
                return path
        return None

    def latest(self, commit: str, files: Mapping[str, RemoteFile]) -> Latest | None:
        """`latest.json`; without one, what it would say of the newest whole snapshot.

        A run's first upload may be cut off before that file. Raises as `Store.latest` does.
        """
        found = super().latest(commit, files)
        folders = [] if LATEST in files else folders_in(files)
        return self._described(commit, files, folders[0]) if folders else found

    def _described(self, commit: str, files: Mapping[str, RemoteFile], folder: str) -> Latest:
        small = [f"{folder}/{name}" for name in (MANIFEST, STATE)]
        if any(path not in files or files[path].size > LARGEST_JSON_BYTES for path in small):
            raise SnapshotError(f"{folder} of {self.name} lacks a small file, or has a large one")
        manifest, content = (self.read(commit, path, LARGEST_JSON_BYTES) for path in small)
        entries_in(parse_json(manifest, small[0]), f"{small[0]} of {self.name}")
        state = state_in(parse_json(content, small[1]), f"{small[1]} of {self.name}")
        digest = sha256(manifest).hexdigest()
        return Latest(state.run_id, state.attempt_id, 1, remote_step(folder), folder, digest)

    def download(self, commit: str, path: str, folder: Path | None, again: bool = False) -> Path:
        """Download a file to `folder`, under its own path."""
        assert folder is not None, "only a repo has a cache"
        found = self.files(commit)
        if path not in found:
            raise SnapshotError(f"{path} is not in {self.title} any more")
        self.download_all(commit, {path: found[path]}, folder, again)
        return folder / path
