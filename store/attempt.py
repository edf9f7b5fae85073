"""The uploads of one attempt to a store: whether it may, what it adds, and what it deletes.

It adds a snapshot (store/latest.py says where), and to the top of a repo, which people look at as
at a model, its model again for from_pretrained, README.md and curves.png. It deletes only what the
manifest of a snapshot names: anybody may put other files there, even into a snapshot's folder.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from snapshot.disk.folder import (
    FILE_NAME,
    MANIFEST,
    entries_in,
    folder_name,
    manifest_sha256,
    parse_json,
    stays,
    step_of,
    verify,
)
from snapshot.disk.state import STATE
from snapshot.errors import SnapshotError
from store.errors import NoRevision, StoreError, StoreMoved, StoreRefused
from store.fence import Fence, Fenced
from store.fetch import INFERENCE, read_store
from store.hub import CARD
from store.latest import (
    LATEST,
    Latest,
    folders_in,
    latest_as_bytes,
    remote_folder,
    remote_step,
    snapshot_folders,
    utc,
)
from store.store import Addition, Head, RemoteFile, Store

CURVES = "curves.png"
Entries = Mapping[str, tuple[int, str]]
"""Of a manifest: size and SHA-256 by file name."""


@dataclass(frozen=True)
class Policy:
    """The keys `hub.*` of the configuration that decide how snapshots are uploaded."""

    keep: int
    min_interval: float
    private: bool
    takeover: bool
    milestone_every: int | None = None
    """Steps between snapshots that are all uploaded, and stay."""

    def is_milestone(self, step: int) -> bool:
        """Whether the snapshot of a step is uploaded in any case, and stays."""
        return self.milestone_every is not None and step % self.milestone_every == 0


@dataclass(frozen=True)
class Card:
    """The model card: README.md, and the loss curves as a PNG, if there are any."""

    text: str
    curves: bytes | None = None


@dataclass(frozen=True)
class Best:
    """The snapshot with the lowest held-out loss."""

    step: int
    loss: float
    folder: Path | None
    """None if only the store has it."""


@dataclass(frozen=True)
class Upload:
    """A snapshot to upload."""

    folder: Path
    card: Card
    best: Best | None = None
    """The snapshot with the lowest held-out loss so far, if that is kept."""
    queued_at: float = 0.0
    """By time.monotonic()."""

    @property
    def step(self) -> int:
        return step_of(self.folder)


@dataclass(frozen=True)
class UploadTarget:
    """The store that an attempt uploads to, and what is known about it at the start."""

    store: Store
    policy: Policy
    run_id: str
    attempt_id: str
    known_latest: Latest | None = None
    """The newest snapshot at the start; None if there was none, or the store was not read."""
    records: Callable[[int], dict[str, bytes]] = lambda step: {}
    """The run's records of the steps up to one, by path in the store. May raise OSError and
    ValueError."""
    was_read: bool = True
    """False if the store could not be reached at the start; it may not even exist."""


class Attempt:
    """Uploads the snapshots of one attempt, one at a time. Not thread-safe."""

    def __init__(self, target: UploadTarget) -> None:
        self._target, self._store, self._policy = target, target.store, target.policy
        self._run_id, self._attempt_id = target.run_id, target.attempt_id
        self.fence = Fence(
            target.store.name,
            target.run_id,
            target.attempt_id,
            target.known_latest,
            target.was_read,
            target.policy.takeover,
        )
        """Which other attempts this one gives way to."""
        self.was_read = target.was_read
        """Whether the store has been read at least once."""
        self._head: Head | None = None
        """What our last upload left; None while it is unknown whether that is the newest."""
        self._latest: Latest | None = None
        """The `latest.json` of our last upload."""

    def upload(self, upload: Upload) -> None:
        """Publish a snapshot, unless the store has it.

        Raises Fenced as `Fence.check` does, StoreError, SnapshotError if the files on disk have
        changed, and OSError if the folder no longer exists.
        """
        head, self._head = self._head, None  # after an error the outcome is unknown
        try:
            self._head = self._upload(upload, head)
        except NoRevision as error:  # a replica that lags, or a repo that was created anew
            raise StoreMoved(str(error), "moved on") from error
        self.fence.has_uploaded = True
        if self._policy.is_milestone(upload.step):
            with suppress(StoreError):  # the snapshot stays in any case
                self._store.tag(folder_name(upload.step), self._head)

    def _upload(self, upload: Upload, ours: Head | None) -> Head:
        if not self.was_read:
            self._store.create(self._policy.private)
            if refusal := read_store(self._store).refusal():
                raise Fenced(refusal)
            self.was_read = True
        head, before = self._look(upload.step, ours)
        latest = self._latest_for(upload, before)
        if latest.is_same_upload(before):  # it succeeded earlier, and its answer was lost
            self._latest = before
            return head
        add = self._additions(upload, latest, head)
        delete = self._deletions(latest, before, head, add)
        head = self._store.publish(head, add, delete, f"Snapshot of step {latest.step}")
        self._latest = latest
        return head

    def _look(self, step: int, ours: Head | None) -> tuple[Head, Latest | None]:
        """What to build on with a snapshot of that step, and its `latest.json`.

        Raises Fenced if another attempt owns the store.
        """
        head = self._store.head(known=ours)
        if self._policy.private and not head.private:
            raise StoreRefused(
                f"{self._store.name} is public now, and hub.private=true. Make it private, or "
                "start with hub.private=false."
            )
        if head is ours:
            return head, self._latest
        try:
            latest = self._store.latest(head)
        except SnapshotError as error:  # it may be that of an attempt that lives
            raise StoreRefused(f"{error}. Restore that file.", LATEST) from error
        if latest is None and (foreign := self._store.foreign_file(head.files)):
            raise StoreRefused(
                f"{self._store.name} holds {foreign} and no {LATEST}, so no run of this project is "
                f"known to own it. Restore {LATEST}, or empty it.",
                "not this run's",
            )
        if self.fence.is_stale(latest, self._latest):
            # A repo's own commit is known to be there. Files are as they are: an attempt that was
            # fenced may have written latest.json after us.
            return (ours or head) if self._store.has_commits else head, self._latest
        self.fence.check(latest, step)
        return head, latest

    def _latest_for(self, upload: Upload, before: Latest | None) -> Latest:
        """`latest.json` on top of `before`. Raises OSError if the snapshot no longer exists."""
        best_step, best_loss = 0, None
        if upload.best is not None:
            best_step, best_loss = upload.best.step, upload.best.loss
        elif before is not None and before.run_id == self._run_id:
            best_step, best_loss = before.best_step, before.best_loss
        return Latest(
            run_id=self._run_id,
            attempt_id=self._attempt_id,
            generation=self.fence.generation,
            step=upload.step,
            folder=remote_folder(upload.folder.name, self._attempt_id),
            manifest_sha256=manifest_sha256(upload.folder),
            machine=platform.node(),
            time=utc(),
            best_step=best_step,
            best_loss=best_loss,
        )

    # What is added.

    def _additions(self, upload: Upload, latest: Latest, head: Head) -> dict[str, Addition]:
        """Contents, records, manifests, and `latest.json` at last."""
        add, manifests = self._snapshot_files(upload.folder)
        if best := self._best_to_add(upload, head):
            for_best, its_manifest = self._snapshot_files(best)
            add, manifests = for_best | add, its_manifest | manifests
        if self._store.has_commits:
            for path in sorted(upload.folder.iterdir()):
                if is_at_the_top(path.name):
                    add[path.name] = Addition(path)
            add[CARD] = Addition(upload.card.text.encode())
            if upload.card.curves is not None:
                add[CURVES] = Addition(upload.card.curves)
        try:
            records = self._target.records(upload.step)
        except (OSError, ValueError) as error:  # they never delay a snapshot
            self._store.note(f"metrics are not uploaded: {str(error).rstrip('.')}.")
            records = {}
        add |= {path: Addition(content) for path, content in records.items()}
        return {**add, **manifests, LATEST: Addition(latest_as_bytes(latest))}

    def _snapshot_files(self, folder: Path) -> tuple[dict[str, Addition], dict[str, Addition]]:
        """The contents of a snapshot, and its manifest. What is compared is what is sent."""
        place, manifest = remote_folder(folder.name, self._attempt_id), folder / MANIFEST
        content = manifest.read_bytes()
        entries = entries_in(parse_json(content, str(manifest)), str(folder))
        contents = {
            f"{place}/{name}": Addition(folder / name, digest)
            for name, (_, digest) in sorted(entries.items())
        }
        return contents, {f"{place}/{MANIFEST}": Addition(content)}

    def _best_to_add(self, upload: Upload, head: Head) -> Path | None:
        """The folder of the best snapshot, unless it is among those of the store, or damaged."""
        best = upload.best
        if best is None or best.folder is None or best.step == upload.step:
            return None
        if best.step in map(remote_step, folders_in(head.files)):
            return None
        try:
            verify(best.folder)
        except SnapshotError as error:
            self._store.note(f"the best snapshot is not uploaded: {str(error).rstrip('.')}.")
            return None
        return best.folder

    # What is deleted.

    def _deletions(
        self, latest: Latest, before: Latest | None, head: Head, add: Collection[str]
    ) -> list[str]:
        """The files of snapshots that do not stay, of each the manifest first."""
        paths: list[str] = []
        for folder in folders_to_delete(head.files, latest, before, self._policy):
            paths += self._files_of(folder, head)
        if self._store.has_commits:
            paths += self._older_at_the_top(before, head, add)
        else:
            paths += self._cut_off(latest, head, add)
        return [path for path in paths if path not in add]

    def _files_of(self, folder: str, head: Head) -> list[str]:
        """The manifest of a snapshot, and the files that it names, as far as they are those."""
        entries = self._entries(folder, head)
        names = {f"{folder}/{name}": entry for name, entry in entries.items()}
        files = [path for path in names if _is_as_named(head.files.get(path), names[path])]
        return [f"{folder}/{MANIFEST}", *sorted(files)] if entries else []

    def _entries(self, folder: str, head: Head) -> Entries:
        """The manifest of a folder; empty without a valid one. Raises StoreError and OSError."""
        path = f"{folder}/{MANIFEST}"
        if path in head.files:
            with suppress(SnapshotError):  # somebody else's
                return entries_in(parse_json(self._store.read(head, path), path), path)
        return {}

    def _older_at_the_top(
        self, before: Latest | None, head: Head, add: Collection[str]
    ) -> list[str]:
        """Files at the top that are those of the snapshot before, and are not replaced."""
        left = [path for path in head.files if is_at_the_top(path) and path not in add]
        if before is None or not left:
            return []
        entries = self._entries(before.folder, head)
        return [path for path in left if _is_as_named(head.files[path], entries.get(path))]

    def _cut_off(self, latest: Latest, head: Head, add: Collection[str]) -> list[str]:
        """What uploads of this attempt have left that failed, and gave way to a newer snapshot.

        Only files that have the name of one of this snapshot: all else there is somebody's.
        """
        names = {path.rpartition("/")[2] for path in add if path.startswith(f"{latest.folder}/")}
        half = snapshot_folders(head.files) - set(folders_in(head.files)) - {latest.folder}
        return [
            path
            for path in head.files
            if (folder := path.rpartition("/")[0]) in half
            and folder.endswith(f"-{self._attempt_id[:8]}")
            and path.rpartition("/")[2] in names
        ]


def folders_to_delete(
    paths: Collection[str], latest: Latest, before: Latest | None, policy: Policy
) -> list[str]:
    """Folders of whole snapshots that do not stay when that of `latest` is there (see `stays`).

    All stay if there was no latest.json to tell which run they belong to, and none of another run
    that was taken over.
    """
    others = [folder for folder in folders_in(paths) if folder != latest.folder]
    if before is None:
        return []
    if before.run_id != latest.run_id:
        return others
    steps = {latest.step, *map(remote_step, others)}
    staying = stays(steps, latest.step, policy.keep, policy.milestone_every, latest.best_step)
    return [folder for folder in others if remote_step(folder) not in staying]


def is_at_the_top(name: str) -> bool:
    """Whether a repo has that file of its newest snapshot at its top, too: for from_pretrained."""
    is_one = FILE_NAME.fullmatch(name) and INFERENCE.fullmatch(name)
    return bool(is_one) and name not in (STATE, MANIFEST)


def _is_as_named(file: RemoteFile | None, entry: tuple[int, str] | None) -> bool:
    """Whether a file is the one that a manifest names, as far as the listing tells."""
    if file is None or entry is None:
        return False
    size, digest = entry
    return file.size == size and file.sha256 in (digest, None)
