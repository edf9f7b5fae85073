"""One commit of a run's repo: it adds a snapshot, and deletes those that are pruned.

snapshots/step-00001000/...                      the newest snapshots
config.json model.safetensors tokenizer*.json    the newest one again, for from_pretrained
latest.json                                      the newest step, its run and its attempt
README.md curves.png                             the model card
metrics/... events.jsonl                         the run's records (snapshot/hub/records.py)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete

from data.tokenizer import TOKENIZER_FILES
from snapshot.disk.files import MANIFEST, manifest_entries, manifest_sha256, step_of
from snapshot.errors import SnapshotError
from snapshot.hub.client import Hub, Operation
from snapshot.hub.errors import HubError
from snapshot.hub.fetch import folders_in, remote_step
from snapshot.hub.latest import LATEST, SNAPSHOTS, Latest, latest_as_bytes
from snapshot.hub.records import replaced_segments
from snapshot.hub.xet import Transfer

WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
CURVES = "curves.png"


@dataclass(frozen=True)
class Card:
    """The model card: README.md, and the loss curves as a PNG, if there are any."""

    text: str
    curves: bytes | None = None


@dataclass(frozen=True)
class Policy:
    """The keys `hub.*` of the configuration that decide how snapshots are uploaded."""

    keep: int
    min_interval: float
    squash_every: int
    private: bool
    takeover: bool


@dataclass(frozen=True)
class Upload:
    """A snapshot to upload."""

    folder: Path
    card: Card

    @property
    def step(self) -> int:
        return step_of(self.folder)


def latest_for(upload: Upload, run_id: str, attempt_id: str, commits: int) -> Latest:
    """`latest.json` for an upload. Raises OSError if the snapshot no longer exists."""
    return Latest(
        run_id=run_id,
        attempt_id=attempt_id,
        step=upload.step,
        folder=f"{SNAPSHOTS}/{upload.folder.name}",
        manifest_sha256=manifest_sha256(upload.folder),
        commits=commits,
    )


def publish(
    hub: Hub,
    upload: Upload,
    latest: Latest,
    before: Latest | None,
    keep: int,
    parent: str,
    records: Mapping[str, bytes],
    confirm: Callable[[], None],
) -> tuple[str, Transfer]:
    """Upload a snapshot in one commit on top of `parent`; returns the commit id, and what it sent.

    `before` is the latest.json of `parent`, `records` are files by their paths. `confirm` is called
    just before the commit, and raises if `parent` is no longer the head. Raises SnapshotError if
    the files on disk have changed, OSError if the folder no longer exists, and HubError, after
    which the outcome is unknown.
    """
    snapshot = _snapshot_files(upload.folder, latest.folder)
    top_level = [
        CommitOperationAdd(path.name, path)
        for path in sorted(upload.folder.iterdir())
        if path.name in ("config.json", *TOKENIZER_FILES) or WEIGHTS.fullmatch(path.name)
    ]
    if upload.card.curves is not None:
        top_level.append(CommitOperationAdd(CURVES, upload.card.curves))
    top_level.append(CommitOperationAdd(LATEST, latest_as_bytes(latest)))
    top_level += [CommitOperationAdd(path, content) for path, content in records.items()]
    transfer = hub.upload_contents([*snapshot, *top_level])
    digests = _digests(upload.folder)
    for operation in snapshot:
        name = Path(operation.path_in_repo).name
        if operation.upload_info.sha256.hex() != digests[name]:
            raise SnapshotError(f"{upload.folder} is damaged: the content of {name} has changed")
    added = {operation.path_in_repo for operation in (*snapshot, *top_level)}
    files = hub.files(parent)
    replaced = replaced_segments(files, records, latest, before)
    deletions = [
        CommitOperationDelete(path, is_folder=False)
        for path in (*_paths_to_delete(files, latest, before, keep), *replaced)
        if path not in added
    ]
    operations: list[Operation] = [*snapshot, *top_level, *deletions]
    card = CommitOperationAdd("README.md", upload.card.text.encode())
    message = f"Snapshot of step {latest.step}"
    confirm()
    try:
        return hub.commit([*operations, card], message, parent), transfer
    except HubError as error:
        if not error.about_card:
            raise
        confirm()
        # Without the card that the Hub rejects.
        return hub.commit(operations, message, parent), transfer


def _snapshot_files(folder: Path, path_in_repo: str) -> list[CommitOperationAdd]:
    names = sorted({*manifest_entries(folder), MANIFEST})
    for name in names:
        (
            folder / name
        ).stat()  # raises OSError; the client would raise ValueError for a missing file
    return [CommitOperationAdd(f"{path_in_repo}/{name}", folder / name) for name in names]


def _digests(folder: Path) -> dict[str, str]:
    digests = {name: digest for name, (_, digest) in manifest_entries(folder).items()}
    return {**digests, MANIFEST: manifest_sha256(folder)}


def _paths_to_delete(
    files: Iterable[str], latest: Latest, before: Latest | None, keep: int
) -> list[str]:
    """Files of snapshots beyond the newest `keep`, and top-level weights in another split.

    Snapshots of later steps stay: the run skipped them, or returned to an earlier step. All stay if
    there was no valid latest.json to tell which run they belong to.
    """
    paths = list(files)
    folders = folders_in(paths) if before is not None else []
    if before is not None and before.run_id == latest.run_id:
        folders = [folder for folder in folders if remote_step(folder) < latest.step][keep - 1 :]
    replaced = {*folders, latest.folder}
    return [
        path for path in paths if path.rpartition("/")[0] in replaced or WEIGHTS.fullmatch(path)
    ]
