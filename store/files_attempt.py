"""The uploads of one attempt to a store of files. No writer damages what another one uploaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from data.tokenizer import TOKENIZER_FILES
from snapshot.disk.folder import MANIFEST, entries_in, parse_json
from snapshot.disk.state import STATE
from store.errors import StoreError, StoreRefused, StoreUnreachable
from store.fence import Fenced
from store.fetch import read_store
from store.files import Files
from store.latest import (
    LATEST,
    Latest,
    attempt_in,
    folders_in,
    latest_as_bytes,
    remote_folder,
    remote_step,
    snapshot_folders,
)
from store.pruning import OPTIMIZER, WEIGHTS, Manifests, folders_to_delete
from store.publish import CONFIGS, best_to_add, content_has_changed, latest_for
from store.records import replaced_segments
from store.store import RemoteFile, Transfer, Upload, UploadTarget


class FilesAttempt:
    """Uploads the snapshots of one attempt, one at a time. Not thread-safe."""

    def __init__(self, store: Files, target: UploadTarget, notify: Callable[[str], None]) -> None:
        """`notify` receives sentences for the user."""
        self._store, self._policy, self._notify = store, target.policy, notify
        self._run_id, self._attempt_id = target.run_id, target.attempt_id
        self._records = target.records
        self._over = {attempt[:8] for attempt in target.ended_attempts}
        self._fence = target.fence
        self._latest: Latest | None = None
        """Our last `latest.json`."""
        self._may_delete: set[str] = set()
        """Folders of other attempts that were whole when this one began to upload. It deletes no
        others: a living attempt may be about to name one in its `latest.json`."""
        self._of_other_run: set[str] = set()
        """Those of them that are of a run that was taken over: none of them stays."""
        self._put: set[str] = set()
        """The records that this attempt has uploaded."""
        self._stale_records: list[str] = []
        self._added: dict[str, list[str]] = {}
        """By folder, the files that this attempt, or one that is over, has uploaded to it. Needed
        where the manifest is missing, because an upload or a deletion was cut off."""
        self._written: set[str] = set()
        """Paths that this attempt has begun to write, and may write again."""
        self._recorded_step = 0
        self._manifests = Manifests(store)
        self._reported: set[str] = set()
        self.repo_was_read = target.repo_was_read

    def upload(self, upload: Upload) -> Transfer:
        """Upload a snapshot, unless the store has it; returns what was sent.

        Raises Fenced, Behind, StoreError, SnapshotError if the files on disk have changed, and
        OSError if the folder no longer exists.
        """
        private = self._open()
        if self._policy.private and not private:
            raise StoreRefused(
                f"{self._store.key} has become public, and hub.private=true. Make it private, or "
                "start with hub.private=false."
            )
        listed = self._store.files("")
        before = self._look(listed, upload.step)
        if self._latest is None:
            self._begin(listed, before)
        transfer = Transfer()
        there = set(folders_in(listed)) - self._of_other_run
        if best := best_to_add(upload, there, partial(self._report_once, "best")):
            transfer += self._add_snapshot(best, upload.step)
        folder = remote_folder(upload.folder.name, self._attempt_id)
        if f"{folder}/{MANIFEST}" not in listed:  # or the answer was lost
            records, reached = self._new_records(upload.step)
            transfer += self._add_snapshot(upload.folder, upload.step, records)
            self._recorded_step = reached
        listed = self._store.files("")
        before, generation = self._look(listed, upload.step), self._fence.generation
        latest = latest_for(upload, self._run_id, self._attempt_id, generation, before)
        if not latest.is_same_upload(before):
            self._store.put({LATEST: latest_as_bytes(latest)})
            self._stale_records = replaced_segments(listed, self._put, latest, before)
        self._latest, self._fence.has_uploaded = latest, True
        return transfer

    def _look(self, listed: Mapping[str, RemoteFile], step: int) -> Latest | None:
        """The present `latest.json`. Raises Fenced or Behind if another attempt owns the store."""
        found = self._store.latest_during_run("", listed)
        if not self._fence.is_stale(found, self._latest):
            self._fence.check(found, step)
        return found

    def _begin(self, listed: Mapping[str, RemoteFile], before: Latest | None) -> None:
        """Note what is there before this attempt's first upload."""
        whole = set(folders_in(listed))
        is_other = before is not None and before.run_id != self._run_id
        # Without latest.json nobody knows which run they belong to.
        self._may_delete = set() if before is None else set(whole)
        self._of_other_run = whole if is_other else set()
        for folder in snapshot_folders(listed) - whole:
            if attempt_in(folder) in self._over:
                paths = [path for path in listed if path.startswith(f"{folder}/")]
                names = {path: path.rpartition("/")[2] for path in paths}
                self._added[folder] = [path for path in paths if is_written(names[path])]
                self._may_delete.add(folder)

    def _add_snapshot(
        self, snapshot: Path, step: int, records: Mapping[str, bytes] = MappingProxyType({})
    ) -> Transfer:
        """Upload a snapshot and records, its manifest last. `step` is that of the whole upload."""
        place = remote_folder(snapshot.name, self._attempt_id)
        manifest = (snapshot / MANIFEST).read_bytes()  # what is compared is what is sent
        entries = entries_in(parse_json(manifest, str(snapshot / MANIFEST)), str(snapshot))
        contents = {f"{place}/{name}": snapshot / name for name in entries}
        self._manifests.note(place, entries)
        self._added[place] = [*contents, f"{place}/{MANIFEST}"]
        sent, transfer = self._send(contents)
        for name, (_, digest) in entries.items():
            if sent[f"{place}/{name}"].sha256 != digest:
                raise content_has_changed(snapshot, name)
        listed = self._store.files("")
        self._check_listed(sent, listed)
        self._look(listed, step)
        self._store.put(records)
        self._put |= records.keys()
        with TemporaryDirectory() as folder:
            (Path(folder) / MANIFEST).write_bytes(manifest)
            self._send({f"{place}/{MANIFEST}": Path(folder) / MANIFEST})  # now it is there
        return transfer

    def _send(self, files: Mapping[str, Path]) -> tuple[dict[str, RemoteFile], Transfer]:
        replaced = self._written & files.keys()
        self._written |= files.keys()
        return self._store.send(files, replaced)

    def _open(self) -> bool:
        """Create the store if it could not be read at the start; returns whether it is private."""
        if not self.repo_was_read:
            self._store.create(self._policy.private)
            if refusal := read_store(self._store).refusal():
                raise Fenced(refusal)
            self.repo_was_read = True
        return self._store.head()[1]

    def _check_listed(
        self, sent: Mapping[str, RemoteFile], listed: Mapping[str, RemoteFile]
    ) -> None:
        """Raise StoreUnreachable unless the store lists all files as they were sent."""
        for path, file in sent.items():
            found = listed.get(path)
            if found is None or found.size != file.size:
                why = f"{self._store.name} has applied an upload in part: {path} is missing"
                raise StoreUnreachable(why, "batch in part")

    def _new_records(self, step: int) -> tuple[dict[str, bytes], int]:
        """The records that this attempt has not uploaded yet. They never delay a snapshot."""
        try:
            return self._records(self._recorded_step, step)
        except (OSError, ValueError) as error:
            self._report_once("records", f"metrics are not uploaded: {str(error).rstrip('.')}.")
            return {}, self._recorded_step

    def tidy(self, step: int) -> None:
        """After the upload of a step: delete old snapshots. Raises nothing."""
        assert self._latest is not None
        try:
            listed = self._store.files("")
            for folder in self._to_delete(listed, self._latest):
                self._added[folder] = paths = self._paths_of(folder, listed)
                if self._delete(paths[:1]) and self._delete(paths[1:]):
                    listed = {path: file for path, file in listed.items() if path not in paths}
            if self._delete(self._stale_records):
                self._stale_records = []
        except StoreUnreachable:
            pass  # tried after the next upload
        except (StoreError, OSError) as error:
            self._report_undeleted(error)

    def _delete(self, paths: Sequence[str]) -> bool:
        """Delete files; False if the store keeps one, as one under a retention rule does.

        Of a snapshot the manifest goes first, so that no half of it counts. Raises
        StoreUnreachable.
        """
        try:
            self._store.delete(paths)
        except StoreUnreachable:
            raise
        except (StoreError, OSError) as error:
            self._report_undeleted(error)
            return False
        return True

    def _report_undeleted(self, error: Exception) -> None:
        self._report_once(
            "delete",
            f"old snapshots still use storage of {self._store.title}: "
            f"{str(error).rstrip('.')}. Uploads continue.",
        )

    def _paths_of(self, folder: str, listed: Mapping[str, RemoteFile]) -> list[str]:
        """The files of a folder that an attempt uploaded, the manifest first."""
        if f"{folder}/{MANIFEST}" in listed:
            return self._manifests.paths("", listed, folder)
        return [path for path in self._added.get(folder, ()) if path in listed]

    def _to_delete(self, listed: Mapping[str, RemoteFile], latest: Latest) -> list[str]:
        """Folders that are not needed any more, the oldest first: old snapshots, cut-off uploads.

        Milestones and the best stay, and whatever another attempt has uploaded since this one
        began.
        """
        whole = folders_in(listed)
        old = folders_to_delete(listed, latest, latest, self._policy)
        unneeded = {*old, *(snapshot_folders(listed) - set(whole))}
        unneeded |= self._of_other_run & set(whole)
        own = {folder for folder in unneeded if attempt_in(folder) == self._attempt_id[:8]}
        deleted = (unneeded & self._may_delete | own) - {latest.folder}
        return sorted(deleted, key=lambda folder: (remote_step(folder), folder))

    def _report_once(self, kind: str, text: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            self._notify(text)


def is_written(name: str) -> bool:
    """Whether a run writes files of that name to a snapshot: all else there is somebody's."""
    weights = WEIGHTS.fullmatch(name) or OPTIMIZER.fullmatch(name)
    return bool(weights) or name in (*CONFIGS, *TOKENIZER_FILES, STATE)
