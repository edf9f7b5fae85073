"""The uploads of one attempt to a bucket. No writer can damage what another one has uploaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from snapshot.disk.files import MANIFEST, manifest_entries
from snapshot.hub.attempt import Fenced, UploadTarget
from snapshot.hub.bucket import BEST, RECORDS, Bucket, folders_in_bucket, run_of, whole_snapshots
from snapshot.hub.errors import HubError, HubRefused, HubUnreachable
from snapshot.hub.fetch import foreign_file_message, read_repo
from snapshot.hub.latest import remote_step
from snapshot.hub.publish import Upload, check_digests
from snapshot.hub.remote import RemoteFile
from snapshot.hub.xet import Transfer, XetFile


class BucketAttempt:
    """Uploads the snapshots of one attempt, one at a time. Not thread-safe."""

    def __init__(self, bucket: Bucket, target: UploadTarget, notify: Callable[[str], None]) -> None:
        """`notify` receives sentences for the user."""
        self._bucket, self._policy, self._notify = bucket, target.policy, notify
        self._run_id, self._records = target.run_id, target.records
        self._own = f"{target.run_id}/{target.attempt_id}/"
        self._ended = frozenset(target.ended_attempts)
        self._known: frozenset[str] = frozenset()
        """The whole snapshots that were there when this attempt began to upload."""
        self._has_begun = False
        self._recorded_step, self._best_step = 0, 0
        self._reported: set[str] = set()
        self.repo_was_read = target.repo_was_read

    def upload(self, upload: Upload) -> Transfer:
        """Upload a snapshot, unless the bucket has it; returns what was sent.

        Raises Fenced, HubError, SnapshotError if the files on disk have changed, and OSError if the
        folder no longer exists.
        """
        private = self._open()
        if self._policy.private and not private:
            raise HubRefused(
                f"{self._bucket.key} has become public, and hub.private=true. Make it private, or "
                "start with hub.private=false."
            )
        self._best_step = self._best_step if upload.best is None else upload.best.step
        listed = self._bucket.files()
        if not self._has_begun:
            self._begin(whole_snapshots(listed))
        place = f"{self._own}{upload.folder.name}"
        if f"{place}/{MANIFEST}" in listed:  # uploaded earlier, and the response was lost
            return Transfer()
        files = {
            f"{place}/{name}": upload.folder / name for name in manifest_entries(upload.folder)
        }
        files[f"{place}/{MANIFEST}"] = upload.folder / MANIFEST
        with TemporaryDirectory() as folder:
            records, reached = self._write_records(upload, Path(folder))
            sent, transfer = self._bucket.upload({**files, **records})
        check_digests({path: sent[path].sha256 for path in files}, upload.folder)
        last = f"{place}/{MANIFEST}"
        contents = {path: one.file for path, one in sent.items() if path != last}
        self._bucket.add(contents)
        self._check_listed(contents)
        self._bucket.add({last: sent[last].file})  # now the snapshot is there
        self._recorded_step = reached
        return transfer

    def _open(self) -> bool:
        """Create the bucket if it could not be read at the start; returns whether it is private."""
        if not self.repo_was_read:
            self._bucket.create(self._policy.private)
            if foreign := read_repo(self._bucket).foreign_file():
                raise Fenced(foreign_file_message(self._bucket, foreign))
            self.repo_was_read = True
        return self._bucket.head()[1]

    def _begin(self, there: list[str]) -> None:
        """Note what is there. Raises Fenced if it is another run's."""
        others = [folder for folder in there if not self._is_ours(folder)]
        if others and not self._policy.takeover:
            raise Fenced(
                f"another run has uploaded step {remote_step(others[0])} to the bucket "
                f"{self._bucket.repo_id}; this one does not upload. Training continues with local "
                "snapshots. Name another hub.bucket; hub.takeover=true replaces what is there."
            )
        self._known, self._has_begun = frozenset(there), True

    def _check_listed(self, contents: dict[str, XetFile]) -> None:
        """Raise HubUnreachable unless the bucket lists all contents as they were added."""
        listed = self._bucket.files()
        for path, file in contents.items():
            found = listed.get(path)
            if found is None or (found.xet_hash, found.size) != (file.xet_hash, file.size):
                why = f"the Hub has applied a batch in part: {path} is missing"
                raise HubUnreachable(why, "batch in part")

    def _write_records(self, upload: Upload, folder: Path) -> tuple[dict[str, Path], int]:
        """The run's new records as files, by their paths in the bucket."""
        records: dict[str, bytes] = {}
        reached = self._recorded_step
        try:
            records, reached = self._records(self._recorded_step, upload.step)
        except (OSError, ValueError) as error:
            self._report_once("records", f"metrics are not uploaded: {str(error).rstrip('.')}.")
        if upload.best is not None:
            best = {"step": upload.best.step, "loss": upload.best.loss}
            records = {**records, BEST: json.dumps(best).encode()}
        files = {}
        for path, content in records.items():
            files[self._own + path] = folder / path
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        return files, reached

    def tidy(self, step: int) -> None:
        """After the upload of a step: delete old snapshots. Raises nothing."""
        try:
            listed = self._bucket.files()
            for folder in self._to_delete(listed, step):
                paths = [path for path in listed if path.startswith(f"{folder}/")]
                if f"{folder}/{MANIFEST}" in paths:  # first, so that no half of it counts
                    paths.remove(f"{folder}/{MANIFEST}")
                    self._bucket.delete([f"{folder}/{MANIFEST}"])
                self._bucket.delete(paths)
                listed = {path: file for path, file in listed.items() if path not in paths}
            self._bucket.delete(self._old_records(listed))
        except HubError as error:
            if isinstance(error, HubRefused):
                self._report_once(
                    "delete",
                    f"old snapshots still use storage of {self._bucket.repo_id}: "
                    f"{str(error).rstrip('.')}. Uploads continue.",
                )

    def _to_delete(self, listed: dict[str, RemoteFile], step: int) -> list[str]:
        """Folders that are not needed any more, the oldest first.

        The newest `hub.keep` snapshots of the run stay, milestones, and the best. So do snapshots
        of later steps, and all that another attempt has uploaded since this one began.
        """
        folders = folders_in_bucket(listed)
        whole = whole_snapshots(listed)
        if any(self._is_rival(folder) for folder in whole):
            self._report_once(
                "another",
                f"another attempt uploads to the bucket {self._bucket.repo_id}. Both keep their "
                "snapshots; the next start continues the one with the higher step.",
            )
        before = [
            folder for folder in whole if self._is_ours(folder) and remote_step(folder) <= step
        ]
        kept = set(before[: self._policy.keep])
        unneeded = (
            folder
            for folder in folders - kept
            if self._may_delete(folder) and not self._stays(folder, step)
        )
        return sorted(unneeded, key=lambda folder: (remote_step(folder), folder))

    def _old_records(self, listed: dict[str, RemoteFile]) -> list[str]:
        """The records of attempts whose snapshots have all been deleted."""
        having = {folder.rpartition("/")[0] for folder in folders_in_bucket(listed)}
        before = {folder.rpartition("/")[0] for folder in self._known if self._may_delete(folder)}
        matches = (RECORDS.fullmatch(path) for path in listed)
        return [match[0] for match in matches if match and match[1] in before - having]

    def _is_ours(self, folder: str) -> bool:
        return run_of(folder) == self._run_id

    def _is_rival(self, folder: str) -> bool:
        """Whether another attempt has uploaded a snapshot since this one began."""
        return not folder.startswith(self._own) and folder not in self._known

    def _may_delete(self, folder: str) -> bool:
        """Whether no attempt that may still run needs a folder.

        Of another attempt that is what was whole when this one began: the rest it may be uploading.
        """
        attempt = folder.split("/")[1]
        if folder.startswith(self._own) or (self._is_ours(folder) and attempt in self._ended):
            return True
        return folder in self._known and (self._is_ours(folder) or self._policy.takeover)

    def _stays(self, folder: str, step: int) -> bool:
        """Whether a snapshot of this run is a milestone, the best, or of a later step."""
        found = remote_step(folder)
        special = self._policy.is_milestone(found) or found == self._best_step
        return self._is_ours(folder) and (special or found > step)

    def _report_once(self, kind: str, text: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            self._notify(text)
