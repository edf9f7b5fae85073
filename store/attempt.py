"""The uploads of one attempt to a store: whether it may, what it adds, and what it deletes.

It adds a snapshot (store/latest.py says where), and to the top of a repo, which people look at as
at a model, its model again for from_pretrained, README.md and curves.png. It deletes only what the
manifest of a snapshot names: anybody may put other files there, even into a snapshot's folder.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
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
)
from snapshot.disk.state import STATE
from snapshot.errors import SnapshotError
from store.errors import NoRevision, StoreError, StoreMoved, StoreRefused
from store.fence import Fence
from store.fetch import INFERENCE
from store.hub import CARD
from store.latest import (
    LATEST,
    Latest,
    folders_in,
    latest_as_bytes,
    remote_folder,
    remote_step,
    utc,
)
from store.store import Addition, Contents, RemoteFile, Store

CURVES = "curves.png"
Entries = Mapping[str, tuple[int, str]]
"""Of a manifest: size and SHA-256 by file name."""


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
    """The store that an attempt uploads to, how, and what is known about it at the start."""

    store: Store
    run_id: str
    attempt_id: str
    keep: int
    """This and the next four are keys `hub.*` of the configuration."""
    private: bool
    takeover: bool
    min_interval: float = 0.0
    milestone_every: int | None = None
    known_latest: Latest | None = None
    """The newest snapshot at the start; None if there was none, or the store was not read."""
    records: Callable[[int], dict[str, bytes]] = lambda step: {}
    """The run's records of the steps up to one, by path in the store. May raise OSError and
    ValueError."""
    was_read: bool = True
    """False if the store could not be reached at the start; it may not even exist."""

    def is_milestone(self, step: int) -> bool:
        """Whether the snapshot of a step is uploaded in any case, and stays."""
        return self.milestone_every is not None and step % self.milestone_every == 0


class Attempt:
    """Uploads the snapshots of one attempt, one at a time. Not thread-safe."""

    def __init__(self, target: UploadTarget) -> None:
        self._target, self._store = target, target.store
        known = 0 if target.known_latest is None else target.known_latest.generation
        self.fence = Fence(
            self._store.name,
            target.run_id,
            target.attempt_id,
            takes_over=target.takeover,
            generation=known + 1 if target.was_read else 0,
        )
        """Which other attempts this one gives way to."""
        self.was_read = target.was_read
        """Whether the store has been read at least once."""
        self._head: Contents | None = None
        """What our last upload left; None while it is unknown whether that is the newest."""
        self._latest: Latest | None = None
        """The `latest.json` of our last upload."""
        self._begun: set[str] = set()
        """Files of snapshots that this attempt has begun to upload."""

    def upload(self, upload: Upload) -> None:
        """Publish a snapshot, unless the store has it.

        Raises Fenced as `Fence.check` does, StoreError, SnapshotError if the files on disk have
        changed, and OSError if the folder no longer exists.
        """
        head, self._head = self._head, None  # after an error the outcome is unknown
        try:
            if not self.was_read:
                self._store.create(self._target.private)
            head = self._look(upload.step, head)
            latest = self._latest_for(upload, head)
            if head.latest is None or not latest.is_same_upload(head.latest):
                add = self._additions(upload, latest)
                delete = self._deletions(latest, head, add)
                head = self._store.publish(head, add, delete, f"Snapshot of step {latest.step}")
                head = replace(head, latest=latest)
        except NoRevision as error:  # a replica that lags, or a repo that was created anew
            raise StoreMoved(str(error), "moved on") from error
        self._head, self._latest, self.fence.has_uploaded = head, head.latest, True
        if self._target.is_milestone(upload.step):
            with suppress(StoreError):  # the snapshot stays in any case
                self._store.tag(folder_name(upload.step), self._head)

    def _look(self, step: int, ours: Contents | None) -> Contents:
        """What to build on with a snapshot of that step.

        Raises Fenced if another attempt owns the store.
        """
        head = self._store.head(known=ours)
        self.was_read = True
        if self._target.private and not head.private:
            raise StoreRefused(
                f"{self._store.name} is public now, and hub.private=true. Make it private, or "
                "start with hub.private=false."
            )
        if head is ours:
            return head
        if refusal := head.refusal():
            raise StoreRefused(refusal, "not this run's")
        if self.fence.is_stale(head.latest, self._latest):
            # A repo's own commit is known to be there. Files are as they are: an attempt that was
            # fenced may have written latest.json after us.
            known = ours if self._store.has_commits else None
            return known or replace(head, latest=self._latest)
        self.fence.check(head.latest, step)
        return head

    def _latest_for(self, upload: Upload, head: Contents) -> Latest:
        """`latest.json` on top of `head`. Raises OSError if the snapshot no longer exists."""
        there = {upload.step, *map(remote_step, folders_in(head.files))}
        best_step, best_loss = 0, None
        if upload.best is not None and upload.best.step in there:
            best_step, best_loss = upload.best.step, upload.best.loss
        elif head.latest is not None and head.latest.run_id == self._target.run_id:
            best_step, best_loss = head.latest.best_step, head.latest.best_loss
        return Latest(
            run_id=self._target.run_id,
            attempt_id=self._target.attempt_id,
            generation=self.fence.generation,
            step=upload.step,
            folder=remote_folder(upload.folder.name, self._target.attempt_id),
            manifest_sha256=manifest_sha256(upload.folder),
            machine=platform.node(),
            time=utc(),
            best_step=best_step,
            best_loss=best_loss,
        )

    # What is added.

    def _additions(self, upload: Upload, latest: Latest) -> dict[str, Addition]:
        """Contents, records, the manifest, and `latest.json` at last."""
        # The manifest is read once: what is compared is what is sent.
        manifest = (upload.folder / MANIFEST).read_bytes()
        entries = entries_in(parse_json(manifest, MANIFEST), str(upload.folder))
        add = {
            f"{latest.folder}/{name}": Addition(upload.folder / name, digest)
            for name, (_, digest) in sorted(entries.items())
        }
        self._begun |= add.keys()
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
        add[f"{latest.folder}/{MANIFEST}"] = Addition(manifest)
        return {**add, LATEST: Addition(latest_as_bytes(latest))}

    # What is deleted.

    def _deletions(self, latest: Latest, head: Contents, add: Collection[str]) -> list[str]:
        """The files of snapshots that do not stay, of each the manifest first."""
        paths: list[str] = []
        for folder in folders_to_delete(head, latest, self._target):
            paths += self._files_of(folder, head)
        at_the_top = [path for path in head.files if is_at_the_top(path) and path not in add]
        if self._store.has_commits and head.latest is not None and at_the_top:
            entries = self._entries(head.latest.folder, head)
            paths += [one for one in at_the_top if _is_as_named(head.files[one], entries.get(one))]
        if not self._store.has_commits:
            # What an upload or a deletion of this attempt has left that failed.
            whole = set(folders_in(head.files))
            self._begun &= head.files.keys() | add
            paths += [path for path in self._begun if path.rpartition("/")[0] not in whole]
        return [path for path in paths if path in head.files and path not in add]

    def _files_of(self, folder: str, head: Contents) -> list[str]:
        """The manifest of a snapshot, and the files that it names, as far as they are those."""
        entries = self._entries(folder, head)
        names = {f"{folder}/{name}": entry for name, entry in entries.items()}
        files = [path for path in names if _is_as_named(head.files.get(path), names[path])]
        return [f"{folder}/{MANIFEST}", *sorted(files)] if entries else []

    def _entries(self, folder: str, head: Contents) -> Entries:
        """The manifest of a folder; empty without a valid one. Raises StoreError and OSError."""
        path = f"{folder}/{MANIFEST}"
        if path in head.files:
            with suppress(SnapshotError):  # somebody else's
                return entries_in(parse_json(self._store.read(head, path), path), path)
        return {}


def folders_to_delete(head: Contents, latest: Latest, target: UploadTarget) -> list[str]:
    """Folders of whole snapshots that do not stay when that of `latest` is there (see `stays`).

    All stay if there was no latest.json to tell which run they belong to, and none of another run
    that was taken over.
    """
    others = [folder for folder in folders_in(head.files) if folder != latest.folder]
    if head.latest is None:
        return []
    if head.latest.run_id != latest.run_id:
        return others
    steps = {latest.step, *map(remote_step, others)}
    staying = stays(steps, latest.step, target.keep, target.milestone_every, latest.best_step)
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
