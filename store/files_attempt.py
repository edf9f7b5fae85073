"""The uploads of one attempt to a store of files. No writer damages what another one uploaded."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from data.tokenizer import TOKENIZER_FILES
from snapshot.disk.files import MANIFEST, entries_in, parse_json
from snapshot.disk.state import STATE
from store.errors import HubError, HubRefused, HubUnreachable
from store.fence import Fenced, Held
from store.fetch import read_repo
from store.files import BEST, OWNER, RECORDS, Files, run_of, snapshot_folders, whole_snapshots
from store.files_ownership import FilesOwnership, claims_in
from store.latest import remote_step
from store.pruning import OPTIMIZER, WEIGHTS, Manifests
from store.publish import CONFIGS, BestCheck, content_has_changed
from store.store import Best, RemoteFile, Transfer, Upload, UploadTarget


class FilesAttempt:
    """Uploads the snapshots of one attempt, one at a time. Not thread-safe."""

    def __init__(self, store: Files, target: UploadTarget, notify: Callable[[str], None]) -> None:
        """`notify` receives sentences for the user."""
        self._store, self._policy, self._notify = store, target.policy, notify
        self._run_id, self._records = target.run_id, target.records
        self._own = f"{target.run_id}/{target.attempt_id}/"
        self._ended = frozenset(target.ended_attempts)
        self._known: frozenset[str] = frozenset()
        """The whole snapshots that were there when this attempt began to upload."""
        self._has_begun = False
        self._added: dict[str, list[str]] = {}
        """By folder, the files that this attempt, or one that is over, has uploaded to it. Needed
        where the manifest is missing, because an upload or a deletion was cut off."""
        self._written: set[str] = set()
        """Paths that this attempt has begun to write, and may write again."""
        self._may_take_over = target.policy.takeover
        """Whether to replace another run's claim: until the first upload."""
        self._found_claim = False
        """Whether there was a claim when this attempt began to upload."""
        self._turn = None if target.hold is None else target.hold.owner.turn
        """Which owner of the run this attempt is; without hub.standby which there was before it."""
        self._owner = target.owner if target.hold is None else None
        self._ownership = FilesOwnership(store)
        self._recorded_step = 0
        self._best = _best_of(target)
        """The best snapshot, which the store has."""
        self._best_check, self._manifests = BestCheck(notify), Manifests(store)
        self._reported: set[str] = set()
        self.repo_was_read = target.repo_was_read

    def upload(self, upload: Upload) -> Transfer:
        """Upload a snapshot, unless the store has it; returns what was sent.

        Raises Fenced, Held, HubError, SnapshotError if the files on disk have changed, and OSError
        if the folder no longer exists.
        """
        private = self._open()
        if self._policy.private and not private:
            raise HubRefused(
                f"{self._store.key} has become public, and hub.private=true. Make it private, or "
                "start with hub.private=false."
            )
        upload = self._best_check.checked(upload)
        listed = self._store.files("")
        if not self._has_begun:
            self._begin(listed)
        self._refuse_later_owner(listed)
        transfer = self._add_best(upload, listed)
        if f"{self._own}{upload.folder.name}/{MANIFEST}" not in listed:  # or the answer was lost
            with TemporaryDirectory() as folder:
                records, reached = self._write_records(upload, Path(folder))
                transfer += self._add_snapshot(upload.folder, records)
            self._recorded_step = reached
        if self._owner is not None:  # the signs of life of one with hub.standby are a thread's
            with suppress(HubError, OSError):
                self._ownership.sign(self._owner.now(upload.step, upload.ended))
        return transfer

    def _add_best(self, upload: Upload, listed: Mapping[str, RemoteFile]) -> Transfer:
        """Upload the best snapshot, unless the store has it or `upload` is that snapshot."""
        best, transfer = upload.best, Transfer()
        if best is None:
            return transfer
        there = best.step == upload.step or self._has(best.step, listed)
        if not there and best.folder is not None:
            transfer, there = self._add_snapshot(best.folder, {}), True
        if there:
            self._best = best
        return transfer

    def _has(self, step: int, listed: Mapping[str, RemoteFile]) -> bool:
        """Whether the store has a whole snapshot of a step of this run."""
        whole = whole_snapshots(listed)
        return any(self._is_ours(folder) and remote_step(folder) == step for folder in whole)

    def _add_snapshot(self, snapshot: Path, records: Mapping[str, Path]) -> Transfer:
        """Upload a snapshot and records, its manifest last."""
        place = f"{self._own}{snapshot.name}"
        manifest = (snapshot / MANIFEST).read_bytes()  # what is compared is what is sent
        entries = entries_in(parse_json(manifest, str(snapshot / MANIFEST)), str(snapshot))
        contents = {f"{place}/{name}": snapshot / name for name in entries}
        self._manifests.note(place, entries)
        self._added[place] = [*contents, f"{place}/{MANIFEST}"]
        sent, transfer = self._send({**contents, **records})
        for name, (_, digest) in entries.items():
            if sent[f"{place}/{name}"].sha256 != digest:
                raise content_has_changed(snapshot, name)
        listed = self._store.files("")
        self._check_listed(sent, listed)
        self._claim(listed)
        self._refuse_later_owner(listed)
        with TemporaryDirectory() as folder:
            (Path(folder) / MANIFEST).write_bytes(manifest)
            self._send({f"{place}/{MANIFEST}": Path(folder) / MANIFEST})  # now it is there
        return transfer

    def _send(self, files: Mapping[str, Path]) -> tuple[dict[str, RemoteFile], Transfer]:
        replaced = self._written & files.keys()
        self._written |= files.keys()
        return self._store.send(files, replaced)

    def _claim(self, listed: Mapping[str, RemoteFile]) -> None:
        """Raise Fenced if another run uploads here: of two that begin at once, one is first."""
        owner = self._store.claim(self._run_id, self._may_take_over)
        has_snapshots = any(run_of(folder) == owner for folder in whole_snapshots(listed))
        if owner != self._run_id and self._found_claim and not has_snapshots:
            # A run claims just before its first manifest. That one ended in between.
            owner = self._store.claim(self._run_id, takes_over=True)
        if owner != self._run_id:
            raise Fenced(f"another run uploads to {self._store.title}; {self._does_not_upload()}")
        self._may_take_over = False

    def _refuse_later_owner(self, listed: Mapping[str, RemoteFile]) -> None:
        """Raise Held if a standby has become the owner since this attempt began."""
        newest = max(claims_in(listed), default=0)
        if self._turn is None:
            self._turn = newest
        if newest < self._turn:  # another disk is mounted there, or none
            raise HubUnreachable(f"{self._store.title} lacks this attempt's claim", "no claim")
        if newest > self._turn:
            steps = map(remote_step, whole_snapshots(listed))
            raise Held(
                f"another attempt of this run owns {self._store.title} now",
                max(steps, default=0),
                math.inf,
            )

    def _does_not_upload(self) -> str:
        return (
            "this one does not upload. Training continues with local snapshots. Name another "
            f"{self._store.key.partition('=')[0]}; hub.takeover=true replaces what is there."
        )

    def _open(self) -> bool:
        """Create the store if it could not be read at the start; returns whether it is private."""
        if not self.repo_was_read:
            self._store.create(self._policy.private)
            if refusal := read_repo(self._store).refusal():
                raise Fenced(refusal)
            self.repo_was_read = True
        return self._store.head()[1]

    def _begin(self, listed: Mapping[str, RemoteFile]) -> None:
        """Note what is there. Raises Fenced if it is another run's."""
        there = whole_snapshots(listed)
        others = [folder for folder in there if not self._is_ours(folder)]
        if others and not self._policy.takeover:
            raise Fenced(
                f"another run has uploaded step {remote_step(others[0])} to {self._store.title}; "
                f"{self._does_not_upload()}"
            )
        for folder in filter(self._is_ended, snapshot_folders(listed) - set(there)):
            paths = [path for path in listed if path.startswith(f"{folder}/")]
            self._added[folder] = [path for path in paths if is_written(path.rpartition("/")[2])]
        self._known, self._found_claim = frozenset(there), OWNER in listed
        self._has_begun = True

    def _check_listed(
        self, sent: Mapping[str, RemoteFile], listed: Mapping[str, RemoteFile]
    ) -> None:
        """Raise HubUnreachable unless the store lists all files as they were sent."""
        for path, file in sent.items():
            found = listed.get(path)
            if found is None or found.size != file.size:
                why = f"{self._store.name} has applied an upload in part: {path} is missing"
                raise HubUnreachable(why, "batch in part")

    def _write_records(self, upload: Upload, folder: Path) -> tuple[dict[str, Path], int]:
        """The run's new records as files, by their paths in the store."""
        records: dict[str, bytes] = {}
        reached = self._recorded_step
        try:
            records, reached = self._records(self._recorded_step, upload.step)
        except (OSError, ValueError) as error:
            self._report_once("records", f"metrics are not uploaded: {str(error).rstrip('.')}.")
        if self._best is not None:
            best = {"step": self._best.step, "loss": self._best.loss}
            records = {**records, BEST: json.dumps(best).encode()}
        files = {}
        for path, content in records.items():
            files[self._own + path] = folder / path
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        return files, reached

    def seconds_until_beat(self) -> float:
        """Infinite: no attempt waits for another one, so none needs signs of life."""
        return math.inf

    def beat(self) -> None:
        """Do nothing: see `seconds_until_beat`."""

    def tidy(self, step: int) -> None:
        """After the upload of a step: delete old snapshots. Raises nothing."""
        try:
            listed = self._store.files("")
            for folder in self._to_delete(listed, step):
                self._added[folder] = paths = self._paths_of(folder, listed)
                if self._delete(paths[:1]) and self._delete(paths[1:]):
                    listed = {path: file for path, file in listed.items() if path not in paths}
            self._delete(self._old_records(listed))
        except HubUnreachable:
            pass  # tried after the next upload
        except (HubError, OSError) as error:
            self._report_undeleted(error)

    def _delete(self, paths: Sequence[str]) -> bool:
        """Delete files; False if the store keeps one, as one under a retention rule does.

        Of a snapshot the manifest goes first, so that no half of it counts. Raises HubUnreachable.
        """
        try:
            self._store.delete(paths)
        except HubUnreachable:
            raise
        except (HubError, OSError) as error:
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

    def _to_delete(self, listed: dict[str, RemoteFile], step: int) -> list[str]:
        """Folders that are not needed any more, the oldest first.

        The newest `hub.keep` snapshots of the run stay, milestones, and the best. So do snapshots
        of later steps, and all that another attempt has uploaded since this one began.
        """
        folders = snapshot_folders(listed)
        whole = whole_snapshots(listed)
        if any(self._is_rival(folder) for folder in whole):
            self._report_once(
                "another",
                f"another attempt uploads to {self._store.title}. Both keep their "
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
        having = {folder.rpartition("/")[0] for folder in snapshot_folders(listed)}
        over = {folder.rpartition("/")[0] for folder in self._known if self._may_delete(folder)}
        over |= {f"{self._run_id}/{attempt}" for attempt in self._ended}
        matches = (RECORDS.fullmatch(path) for path in listed)
        return [match[0] for match in matches if match and match[1] in over - having]

    def _is_ours(self, folder: str) -> bool:
        return run_of(folder) == self._run_id

    def _is_ended(self, folder: str) -> bool:
        """Whether an attempt of this run that is over has uploaded a folder."""
        return self._is_ours(folder) and folder.split("/")[1] in self._ended

    def _is_rival(self, folder: str) -> bool:
        """Whether another attempt has uploaded a snapshot since this one began."""
        return not folder.startswith(self._own) and folder not in self._known

    def _may_delete(self, folder: str) -> bool:
        """Whether no attempt that may still run needs a folder.

        Of another attempt that is what was whole when this one began: the rest it may be uploading.
        """
        if folder.startswith(self._own) or self._is_ended(folder):
            return True
        return folder in self._known and (self._is_ours(folder) or self._policy.takeover)

    def _stays(self, folder: str, step: int) -> bool:
        """Whether a snapshot of this run is a milestone, the best, or of a later step."""
        found = remote_step(folder)
        is_best = self._best is not None and found == self._best.step
        special = self._policy.is_milestone(found) or is_best
        return self._is_ours(folder) and (special or found > step)

    def _report_once(self, kind: str, text: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            self._notify(text)


def _best_of(target: UploadTarget) -> Best | None:
    """The best snapshot that an earlier attempt of the run has uploaded."""
    known = target.known_latest
    if known is None or known.run_id != target.run_id or known.best_loss is None:
        return None
    return Best(known.best_step, known.best_loss, None)


def is_written(name: str) -> bool:
    """Whether a run writes files of that name to a snapshot: all else there is somebody's."""
    weights = WEIGHTS.fullmatch(name) or OPTIMIZER.fullmatch(name)
    return bool(weights) or name in (*CONFIGS, *TOKENIZER_FILES, STATE)
