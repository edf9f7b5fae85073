"""One commit of a run's repo: it adds a snapshot, and deletes those that are pruned.

snapshots/step-00001000-3f2a1b2c/...             the newest snapshots, with their attempt's id
config.json model.safetensors tokenizer*.json    the newest one again, for from_pretrained
latest.json                                      the newest step, run, attempt, generation
README.md curves.png                             the model card
metrics/... events.jsonl                         the run's records (store/records.py)
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import huggingface_hub  # imports the rest at its first use

from data.tokenizer import TOKENIZER_FILES
from data.tokenizer_files import GENERATION
from snapshot.disk.folder import MANIFEST, manifest_entries, manifest_sha256, verify
from snapshot.disk.model import ADAPTER_CONFIG, CONFIG
from snapshot.errors import SnapshotError
from store.errors import StoreError, StoreRefused
from store.hub import OWN_FILES, Hub
from store.latest import (
    LATEST,
    Latest,
    folders_in,
    latest_as_bytes,
    machine_name,
    remote_folder,
    remote_step,
    utc,
)
from store.pruning import WEIGHTS, Manifests, folders_to_delete, weights_in_another_split
from store.records import replaced_segments
from store.store import Policy, RemoteFile, Transfer, Upload

CONFIGS = (CONFIG, ADAPTER_CONFIG, GENERATION)
CURVES = "curves.png"


@dataclass(frozen=True)
class Published:
    """What an upload has done."""

    commit: str
    transfer: Transfer
    unneeded: frozenset[str]
    """Large files, by their SHA-256, that the commit before had and this one does not."""


def latest_for(
    upload: Upload,
    run_id: str,
    attempt_id: str,
    generation: int,
    before: Latest | None,
) -> Latest:
    """`latest.json` for an upload on top of `before`.

    Raises OSError if the snapshot no longer exists.
    """
    best_step, best_loss = 0, None
    if upload.best is not None:
        best_step, best_loss = upload.best.step, upload.best.loss
    elif before is not None and before.run_id == run_id:
        best_step, best_loss = before.best_step, before.best_loss
    return Latest(
        run_id=run_id,
        attempt_id=attempt_id,
        generation=generation,
        step=upload.step,
        folder=remote_folder(upload.folder.name, attempt_id),
        manifest_sha256=manifest_sha256(upload.folder),
        machine=machine_name(platform.node()),
        time=utc(),
        best_step=best_step,
        best_loss=best_loss,
    )


def publish(
    hub: Hub,
    upload: Upload,
    latest: Latest,
    before: Latest | None,
    *,
    parent: str,
    policy: Policy,
    manifests: Manifests,
    records: Mapping[str, bytes],
    confirm: Callable[[], None],
    report: Callable[[str], None],
) -> Published:
    """Upload a snapshot in one commit on top of `parent`.

    `before` is the latest.json of `parent`, `records` are files by their paths. `manifests` are
    those of the repo. `confirm` is called just before the commit, and raises if `parent` is no
    longer the head. `report` receives a sentence about a best snapshot that is damaged. Raises
    SnapshotError if the files on disk have changed, OSError if the folder no longer exists, and
    StoreError, after which the outcome is unknown.
    """
    files = hub.files(parent)
    pruned = folders_to_delete(files, latest, before, policy)
    folders = {latest.folder: upload.folder}
    if best := best_to_add(upload, set(folders_in(files)) - set(pruned), report):
        folders[remote_folder(best.name, latest.attempt_id)] = best
    snapshots = {place: _snapshot_files(folder, place) for place, folder in folders.items()}
    added = [*chain(*snapshots.values()), *_top_level_files(upload, latest, records)]
    transfer = hub.upload_contents(added)
    for place, folder in folders.items():
        check_digests(_digests_of(snapshots[place]), folder)
    if before is None:
        _refuse_to_overwrite(hub, files, added)
    new = {one.path_in_repo for one in added}
    deleted = {
        *(path for folder in pruned for path in manifests.paths(parent, files, folder)),
        *weights_in_another_split(files, new, manifests, before, parent),
        *replaced_segments(files, records, latest, before),
    } - new
    deletions = [
        huggingface_hub.CommitOperationDelete(path, is_folder=False) for path in sorted(deleted)
    ]
    operations: list[huggingface_hub.CommitOperation] = [*added, *deletions]
    card = huggingface_hub.CommitOperationAdd("README.md", upload.card.text.encode())
    message = f"Snapshot of step {latest.step}"
    for place, folder in folders.items():
        manifests.note(place, manifest_entries(folder))
    confirm()
    try:
        commit = hub.commit([*operations, card], message, parent)
    except StoreError as error:
        if not error.about_card:
            raise
        confirm()
        # Without the card that the Hub rejects.
        commit = hub.commit(operations, message, parent)
    unneeded = _unneeded(files, added, deleted) & manifests.digests
    return Published(commit, transfer, unneeded)


def _unneeded(
    files: Mapping[str, RemoteFile],
    added: Iterable[huggingface_hub.CommitOperationAdd],
    deleted: Collection[str],
) -> frozenset[str]:
    """The large files of a commit that are not in the next one."""
    new = _digests_of(added)
    stay = {file.sha256 for path, file in files.items() if path not in deleted and path not in new}
    before = {file.sha256 for file in files.values() if file.sha256 is not None}
    return frozenset(before - stay - set(new.values()))


def _snapshot_files(folder: Path, path_in_repo: str) -> list[huggingface_hub.CommitOperationAdd]:
    names = sorted({*manifest_entries(folder), MANIFEST})
    for name in names:  # raises OSError; the client would raise ValueError for a missing file
        (folder / name).stat()
    return [
        huggingface_hub.CommitOperationAdd(f"{path_in_repo}/{name}", folder / name)
        for name in names
    ]


def _top_level_files(
    upload: Upload, latest: Latest, records: Mapping[str, bytes]
) -> list[huggingface_hub.CommitOperationAdd]:
    """The files at the top of the repo, without the model card, and the records."""
    files = [
        huggingface_hub.CommitOperationAdd(path.name, path)
        for path in sorted(upload.folder.iterdir())
        if path.name in (*CONFIGS, *TOKENIZER_FILES) or WEIGHTS.fullmatch(path.name)
    ]
    small = {LATEST: latest_as_bytes(latest), **records}
    if upload.card.curves is not None:
        small[CURVES] = upload.card.curves
    return files + [
        huggingface_hub.CommitOperationAdd(path, content) for path, content in small.items()
    ]


def _digests_of(operations: Iterable[huggingface_hub.CommitOperationAdd]) -> dict[str, str]:
    return {one.path_in_repo: one.upload_info.sha256.hex() for one in operations}


def check_digests(sent: Mapping[str, str], folder: Path) -> None:
    """Raise SnapshotError if a file, by its remote path, is not what its snapshot's manifest says.

    `sent` has the SHA-256 of what was sent.
    """
    digests = {name: digest for name, (_, digest) in manifest_entries(folder).items()}
    digests[MANIFEST] = manifest_sha256(folder)
    for path, digest in sent.items():
        name = path.rpartition("/")[2]
        if digest != digests[name]:
            raise content_has_changed(folder, name)


def content_has_changed(folder: Path, name: str) -> SnapshotError:
    """The error for a file that is not as its snapshot's manifest says."""
    return SnapshotError(f"{folder} is damaged: the content of {name} has changed")


def _refuse_to_overwrite(
    hub: Hub,
    files: Mapping[str, RemoteFile],
    added: Iterable[huggingface_hub.CommitOperationAdd],
) -> None:
    """Raise StoreRefused if files are there that no latest.json says to be a run's."""
    theirs = files.keys() - OWN_FILES
    if others := sorted({one.path_in_repo for one in added} & theirs):
        raise StoreRefused(
            f"{hub.repo_id} holds {others[0]} and no {LATEST}, so no run of this project is known "
            f"to own it. Restore {LATEST} from an earlier commit, or empty the repo.",
            "not this run's",
        )


def best_to_add(
    upload: Upload, folders: Collection[str], report: Callable[[str], None]
) -> Path | None:
    """The folder of the best snapshot, unless it is among those of the store, or damaged."""
    best = upload.best
    if best is None or best.folder is None or best.step == upload.step:
        return None
    if best.step in map(remote_step, folders):
        return None
    try:
        verify(best.folder)
    except SnapshotError as error:
        report(f"the best snapshot is not uploaded: {str(error).rstrip('.')}.")
        return None
    return best.folder
