"""A store of plain files, without commits: snapshots go one by one.

<run>/<attempt>/step-00001000/...     a snapshot; it counts when its manifest.json is there
<run>/<attempt>/metrics/... events.jsonl best.json alive.json
owner.json                            the run that uploads, if the store creates files atomically
owner-00000003.json                   its third owner, with hub.standby

Such a store cannot change several files at once. So each attempt writes to a folder of its own, and
a snapshot's manifest.json comes last.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from snapshot.disk.files import (
    LARGEST_STEP,
    MANIFEST,
    SYSTEM_FILES,
    manifest_entries,
    manifest_sha256,
    read_json,
)
from snapshot.errors import SnapshotError
from store.latest import Latest, best_in, remote_step
from store.store import RemoteFile, Store, Transfer

ATTEMPT = r"[0-9a-f]{32}/[0-9a-f]{32}"
"""A run and an attempt."""
FOLDER = re.compile(rf"({ATTEMPT}/step-[0-9]{{8,13}})/[^/]+")
BEST = "best.json"
PARTIAL = ".partial"
"""On a disk, the file that gets its name when all of it is there."""
ALIVE = "alive.json"
"""The signs of life of an attempt: store/files_ownership.py."""
RECORDS = re.compile(
    rf"({ATTEMPT})/(metrics/from-[0-9]{{8,13}}\.jsonl|events\.jsonl|best\.json|alive\.json|"
    r"\.partial(?:-alive)?)"
)
OWNER = "owner.json"
CLAIM_PART = re.compile(r"\.partial-[0-9a-f]{8}")
"""On a disk, a claim that an attempt was killed while writing."""
CLAIM = re.compile(r"owner-([0-9]{8})(?:-[0-9a-f]{8})?\.json")
"""The claim of an attempt that owns the run; of the numbers, the highest counts."""
LARGEST_JSON_BYTES = 4 << 20


class Files(Store):
    """A store of files, as a start reads it; its only commit is the present state.

    Every method raises HubError.
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
        """Write small files, which may exist."""

    @abstractmethod
    def delete(self, paths: Collection[str]) -> None:
        """Delete files. It may be applied in part.

        Raises HubRefused for a file that the store keeps: the others are still deleted later.
        """

    def claim(self, run_id: str, takes_over: bool = False) -> str:
        """The run that uploads here: that one, if there is none yet or it takes over.

        A store that cannot create a file at once cannot tell, and returns that one.
        """
        return run_id

    creates_files = False
    """Whether `create_file` can tell that it was first."""

    def create_file(self, path: str, content: bytes) -> bool:
        """Create a small file at the top; False if there is one. Only where `creates_files`."""
        raise NotImplementedError

    def folders(self, files: Iterable[str], latest: Latest | None) -> list[str]:
        """The whole snapshots of the run of `latest`, of all its attempts, the newest first."""
        found = whole_snapshots(files)
        return [folder for folder in found if latest is None or run_of(folder) == latest.run_id]

    def foreign_file(self, files: Iterable[str]) -> str | None:
        """A file that no run uploaded, and no file manager created."""
        known = (FOLDER, RECORDS, CLAIM, CLAIM_PART)
        for path in sorted(files):
            is_known = path == OWNER or any(pattern.fullmatch(path) for pattern in known)
            if not (is_known or SYSTEM_FILES.fullmatch(path.rpartition("/")[2])):
                return path
        return None

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
        best_step, best_loss = best or (0, None)
        latest = Latest(
            run,
            attempt,
            remote_step(folder),
            folder,
            digest,
            best_step=best_step,
            best_loss=best_loss,
        )
        steps = {remote_step(one) for one in self.folders(files, latest)}
        return latest if latest.best_step in steps else latest.without_best()

    def attempt_prefix(self, folder: str) -> str:
        """`<run>/<attempt>/`: each attempt has a folder of its own."""
        return f"{folder.rpartition('/')[0]}/"

    def download(self, commit: str, path: str, folder: Path | None, again: bool = False) -> Path:
        """Download a file to `folder`, under its own path."""
        assert folder is not None, "only a repo has a cache"
        found = self.files(commit)
        if path not in found:
            raise SnapshotError(f"{path} is not in {self.title} any more")
        self.download_all(commit, {path: found[path]}, folder, again)
        return folder / path


def snapshot_folders(paths: Iterable[str]) -> set[str]:
    """The folders of snapshots among the paths of a store, whole or not."""
    return {match[1] for path in paths if (match := FOLDER.fullmatch(path))}


def whole_snapshots(paths: Iterable[str]) -> list[str]:
    """The folders among the paths of a store that have a manifest, the newest first."""
    folders = snapshot_folders(path for path in paths if path.endswith(f"/{MANIFEST}"))
    usable = (folder for folder in folders if remote_step(folder) <= LARGEST_STEP)
    return sorted(usable, key=lambda folder: (remote_step(folder), folder), reverse=True)


def run_of(folder: str) -> str:
    """The run of `<run>/<attempt>/step-00000100`."""
    return folder.partition("/")[0]
