"""What one commit of a run's repo carries: a snapshot, a copy of it to load, and what goes.

snapshots/step-00001000/...                      the kept snapshots
config.json model.safetensors tokenizer*.json    the newest again, where from_pretrained looks
latest.json                                      whose it is, and which
README.md curves.png                             for people
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
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

WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
CURVES = "curves.png"


@dataclass(frozen=True)
class Card:
    """The repo's face: README.md, and the curves as a PNG where there are some."""

    text: str
    curves: bytes | None = None


@dataclass(frozen=True)
class Policy:
    """How uploads behave: `hub.*` of the configuration."""

    keep: int
    min_interval: float
    squash_every: int
    private: bool
    takeover: bool


@dataclass(frozen=True)
class Upload:
    """A snapshot on its way to the Hub."""

    folder: Path
    card: Card

    @property
    def step(self) -> int:
        return step_of(self.folder)


def latest_for(upload: Upload, run_id: str, attempt_id: str, commits: int) -> Latest:
    """`latest.json` for an upload. Raises OSError where the snapshot is gone."""
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
    confirm: Callable[[], None] = lambda: None,
) -> str:
    """Upload a snapshot in one commit on top of `parent`, whose latest.json is `before`; its id.

    `confirm` is called just before the commit, to raise where `parent` is no longer the head.
    Raises SnapshotError when the disk no longer holds what was written, OSError when the folder is
    gone, HubError: after that, the outcome is unknown.
    """
    snapshot = _snapshot_files(upload.folder, latest.folder)
    # Contents first, alone: a content that stands in a commit twice would be sent twice.
    hub.upload_contents(snapshot)
    digests = _digests(upload.folder)
    for operation in snapshot:
        name = Path(operation.path_in_repo).name
        if operation.upload_info.sha256.hex() != digests[name]:
            raise SnapshotError(f"{upload.folder} is damaged: the content of {name} has changed")
    beside = [
        CommitOperationAdd(path.name, path)
        for path in sorted(upload.folder.iterdir())
        if path.name in ("config.json", *TOKENIZER_FILES) or WEIGHTS.fullmatch(path.name)
    ]
    if upload.card.curves is not None:
        beside.append(CommitOperationAdd(CURVES, upload.card.curves))
    beside.append(CommitOperationAdd(LATEST, latest_as_bytes(latest)))
    hub.upload_contents(beside)
    added = {operation.path_in_repo for operation in (*snapshot, *beside)}
    gone = [
        CommitOperationDelete(path, is_folder=False)
        for path in _superfluous(hub.files(parent), latest, before, keep)
        if path not in added
    ]
    operations: list[Operation] = [*snapshot, *beside, *gone]
    card = CommitOperationAdd("README.md", upload.card.text.encode())
    message = f"Snapshot of step {latest.step}"
    confirm()
    try:
        return hub.commit([*operations, card], message, parent)
    except HubError as error:
        if not error.about_card:
            raise
        confirm()
        return hub.commit(operations, message, parent)  # a card is not worth a snapshot


def _snapshot_files(folder: Path, place: str) -> list[CommitOperationAdd]:
    names = sorted({*manifest_entries(folder), MANIFEST})
    for name in names:
        (folder / name).stat()  # the client's error for a file that is gone is a ValueError
    return [CommitOperationAdd(f"{place}/{name}", folder / name) for name in names]


def _digests(folder: Path) -> dict[str, str]:
    digests = {name: digest for name, (_, digest) in manifest_entries(folder).items()}
    return {**digests, MANIFEST: manifest_sha256(folder)}


def _superfluous(
    files: Iterable[str], latest: Latest, before: Latest | None, keep: int
) -> list[str]:
    """Snapshots beyond the newest `keep`, and weights of an earlier one in other pieces.

    Snapshots of later steps are not ours to judge: the run passed over them, or went back. Nor are
    any where latest.json does not say whose they are.
    """
    paths = list(files)
    folders = folders_in(paths) if before is not None else []
    if before is not None and before.run_id == latest.run_id:
        folders = [folder for folder in folders if remote_step(folder) < latest.step][keep - 1 :]
    here = {*folders, latest.folder}
    return [path for path in paths if path.rpartition("/")[0] in here or WEIGHTS.fullmatch(path)]
