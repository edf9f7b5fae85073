"""Downloads of snapshots from the Hub, verified before they are used.

Only files whose names a manifest may list are downloaded, and only if they have the manifest's
sizes. The snapshot's folder becomes visible when all of it is verified.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from snapshot.disk.checking import check_model, check_snapshot
from snapshot.disk.files import (
    LARGEST_JSON_BYTES,
    MANIFEST,
    SYSTEM_FILES,
    check_file,
    entries_in,
    folder_name,
    manifest_entries,
    parse_json,
)
from snapshot.disk.numbers import NumberChecks
from snapshot.disk.pruning import make_way, remove_folder
from snapshot.disk.state import STATE, RunState, state_in
from snapshot.disk.writing import atomic_folder
from snapshot.errors import DiskFault, OtherRun, SnapshotError, is_full
from store.errors import NoFile, NoRevision
from store.latest import WRITTEN_BY_010, Latest, remote_step
from store.pruning import LARGEST_MANIFEST_BYTES
from store.store import BRANCH, RemoteFile, Store, with_retries

PARTIAL = ".download"
"""The folder of an unfinished download, below the snapshots."""
NOT_FOR_SAMPLING = "optimizer"
"""The prefix of the files that inference does not need."""


@dataclass(frozen=True)
class Contents:
    """The contents of a repo at one commit."""

    store: Store
    commit: str
    private: bool
    files: dict[str, RemoteFile]
    latest: Latest | None
    fault: str | None = None
    """What is wrong with its latest.json, if anything."""
    revision: str = BRANCH
    """The branch, tag or commit that was read."""

    @property
    def name(self) -> str:
        """Repo and commit, for messages."""
        return f"{self.store.name}@{self.commit[:8]}".rstrip("@")

    @property
    def lack(self) -> str:
        """A sentence for a repo without snapshots."""
        reason = "" if self.fault is None else f": {self.fault}"
        return f"there is no snapshot in {self.name}{reason}."

    def folders(self) -> list[str]:
        """Its snapshot folders, the one of latest.json first, then the newest first."""
        return self.store.folders(self.files, self.latest)

    def refusal(self) -> str | None:
        """Why a run may not use the repo: it holds something that no run uploaded.

        None if the repo belongs to a run, or is new.
        """
        if self.fault is not None and WRITTEN_BY_010 in self.fault:
            return f"{self.store.key} cannot be used: {self.fault}, and name another store."
        if self.fault is not None:
            return (
                f"{self.store.key} cannot be used: {self.fault}, so no run of this project is "
                "known to own it. Name one that is new or empty. If a run owns it, restore that "
                "file, or "
                f"continue from its snapshots with snapshot.resume={self.store.url}, another "
                "run.name and a new store."
            )
        if foreign := self.store.foreign_file(self.files):
            return (
                f"{self.store.key} holds {foreign}, which no run of this project uploaded. Name "
                "one that is new or empty, or move that file away."
            )
        return None


def read_store(store: Store, revision: str = BRANCH) -> Contents:
    """Read the contents of a repo. Raises StoreError."""
    commit, private = store.head(revision)
    files = store.files(commit)
    try:
        latest = store.latest(commit, files)
    except SnapshotError as error:
        return Contents(store, commit, private, files, None, str(error), revision)
    return Contents(store, commit, private, files, latest, revision=revision)


def fetch(repo: Contents, folder: str, root: Path) -> Path:
    """Download a snapshot to `root` and verify it; returns its folder.

    Raises SnapshotError if it is not valid, StoreError if the download fails.
    """
    target = root / PARTIAL
    try:
        downloaded = _twice(root, lambda: _download_verified(repo, folder, target))
        final = root / folder_name(remote_step(folder))
        with atomic_folder(root, final.name, make_way) as building:
            for path in downloaded.iterdir():
                path.rename(building / path.name)
        remove_partial(root)
        return final
    except SnapshotError:
        remove_partial(root)
        raise
    except OSError as error:
        raise _disk_fault(repo, folder, root, error) from error


def _twice(root: Path, download: Callable[[], Path]) -> Path:
    """Download to `root`, and all of it once more if it is damaged, perhaps in transit."""
    try:
        return download()
    except SnapshotError:
        remove_partial(root)
        return download()


def _disk_fault(repo: Contents, folder: str, root: Path, error: OSError) -> DiskFault:
    remedy = "Free some space there" if is_full(error) else "Make that folder writable"
    return DiskFault(
        f"{folder} of {repo.name} cannot be written to {root}: {error.strerror}. {remedy}."
    )


def remove_partial(root: Path) -> None:
    """Remove an unfinished download, which the next download would otherwise continue."""
    if (root / PARTIAL).exists():
        remove_folder(root / PARTIAL)


def fetch_for_sampling(repo: Contents, folder: str) -> Path:
    """Download the files needed for inference to the Hub client's cache and verify them.

    The cache stores equal files of several commits once, and `hf cache` lists and removes them.
    Damaged files in it are downloaded again. Raises as `fetch` does.
    """
    try:
        return _download_for_sampling(repo, folder)
    except DiskFault:
        raise
    except SnapshotError:
        return _download_for_sampling(repo, folder, again=True)


def _download_for_sampling(repo: Contents, folder: str, again: bool = False) -> Path:
    downloaded = _download_some(repo, folder, None, is_for_sampling, again)
    check_model(downloaded)
    return downloaded


def fetch_small(repo: Contents, folder: str, root: Path) -> Path:
    """Download the small files of a snapshot, with which a later `fetch` to `root` begins.

    They are its state, configuration and tokenizer. Raises as `fetch` does.
    """
    try:
        return _twice(root, lambda: _download_some(repo, folder, root / PARTIAL, is_small))
    except OSError as error:
        raise _disk_fault(repo, folder, root, error) from error


def is_small(name: str) -> bool:
    """Whether a file of a snapshot holds no tensors."""
    return not name.endswith(".safetensors")


def _download_some(
    repo: Contents,
    folder: str,
    target: Path | None,
    wanted: Callable[[str], bool],
    again: bool = False,
) -> Path:
    """Download the wanted files of a snapshot as `_download` does, and verify them."""
    downloaded = _download(repo, folder, target, wanted, again)
    numbers = NumberChecks()
    for name, (_, digest) in manifest_entries(downloaded).items():
        if wanted(name):
            check_file(downloaded / name, digest, numbers.read, f"{folder} of {repo.name}")
    return downloaded


def fetch_state(repo: Contents, folder: str) -> RunState:
    """The state of a snapshot, of which nothing else is downloaded.

    Raises SnapshotError and StoreError, and of a bucket OSError if there is no temporary folder.
    """
    name = f"{folder} of {repo.name}"
    listed, content = _read_json(repo, f"{folder}/{MANIFEST}", f"{folder}/{STATE}")
    manifest = parse_json(listed, f"{MANIFEST} in {name}")
    _, digest = entries_in(manifest, f"{MANIFEST} in {name}").get(STATE, (0, ""))
    if hashlib.sha256(content).hexdigest() != digest:
        raise SnapshotError(f"{name} is damaged: {STATE} is not as its manifest says")
    state = state_in(parse_json(content, f"{STATE} in {name}"), name)
    if state.step != remote_step(folder):
        raise SnapshotError(f"{name} holds another step than its name says")
    return state


def _read_json(repo: Contents, *paths: str) -> list[bytes]:
    for path in paths:
        if path not in repo.files or repo.files[path].size > LARGEST_JSON_BYTES:
            raise SnapshotError(f"{repo.name} has no {path} of a valid size")
    return [repo.store.read(repo.commit, path, LARGEST_JSON_BYTES) for path in paths]


def is_for_sampling(name: str) -> bool:
    """Whether a file of a snapshot is needed for inference."""
    return not name.startswith(NOT_FOR_SAMPLING)


def _download(
    repo: Contents,
    folder: str,
    target: Path | None,
    wanted: Callable[[str], bool] = lambda name: True,
    again: bool = False,
) -> Path:
    """Download the wanted files of a snapshot to `target`; returns the folder with them.

    Sizes and hashes in the listing must match the manifest. Without `target`, the files go to the
    Hub client's cache; with `again`, existing files are replaced.
    """
    inside = f"{folder}/"
    listed = {
        path.removeprefix(inside): file
        for path, file in repo.files.items()
        if path.startswith(inside) and SYSTEM_FILES.fullmatch(path.removeprefix(inside)) is None
    }
    manifest = listed.pop(MANIFEST, None)
    if manifest is None or manifest.size > LARGEST_MANIFEST_BYTES:
        raise SnapshotError(f"{folder} of {repo.name} has no {MANIFEST} of a valid size")
    downloaded = repo.store.download(repo.commit, inside + MANIFEST, target, again).parent
    if target is not None:  # the client returns an absolute path, also for a relative folder
        downloaded = target / folder
    entries = manifest_entries(downloaded)
    if unmatched := sorted(set(listed) ^ set(entries)):
        raise SnapshotError(
            f"{folder} of {repo.name}: {unmatched[0]} is missing, or not in the manifest"
        )
    for name, (size, digest) in entries.items():
        if listed[name].size != size or listed[name].sha256 not in (digest, None):
            raise SnapshotError(f"{folder} of {repo.name}: {name} is not as its manifest says")
    files = {inside + name: listed[name] for name in entries if wanted(name)}
    repo.store.download_all(repo.commit, files, target, again)
    return downloaded


def _download_verified(repo: Contents, folder: str, target: Path) -> Path:
    """Download all files of a snapshot to `target` and verify them; returns their folder."""
    try:
        downloaded = _download(repo, folder, target)
        state = check_snapshot(downloaded)
    except SnapshotError as error:  # name the repo, not the temporary folder
        inside = str(target / folder)
        raise SnapshotError(str(error).replace(inside, f"{folder} of {repo.name}")) from error
    if state.step != remote_step(folder):
        raise SnapshotError(f"{folder} of {repo.name} holds another step than its name says")
    return downloaded


MOST_HEADS = 10
"""After so many, each pruned while it was downloaded, a reader ends."""
Download = Callable[[Contents, str], Path]
"""Downloads a snapshot of a repo, by its folder there; returns its folder here."""


class NoneWhole(SnapshotError):
    """A repo has no whole snapshot."""

    def __init__(self, repo: Contents, faults: tuple[str, ...]) -> None:
        reasons = "; ".join(dict.fromkeys(faults))
        what = f"none of the snapshots in {repo.name} is whole: {reasons}."
        super().__init__(what if faults else repo.lack)
        self.repo, self.faults = repo, faults


@dataclass(frozen=True)
class Fetched:
    """A whole snapshot of a repo, on this disk."""

    path: Path
    repo: Contents
    """The repo as it was when the snapshot was in it."""
    folder: str
    """Where it is there."""
    faults: tuple[str, ...]
    """What is wrong with the newer ones, without full stops."""


def newest_whole(
    repo: Contents,
    download: Download,
    folders: Callable[[Contents], list[str]] = Contents.folders,
) -> Fetched:
    """Download the first of `folders` that is whole.

    If one is not, the repo is read again: a snapshot that was pruned meanwhile has a successor.
    Raises NoneWhole, StoreError, and what `download` raises about this disk or another run.
    """
    faults: tuple[str, ...] = ()
    left = folders(repo)
    heads = 1
    while left:
        folder = left.pop(0)
        try:
            return Fetched(download(repo, folder), repo, folder, faults)
        except (DiskFault, OtherRun):
            raise
        except (SnapshotError, NoFile, NoRevision) as error:
            now = with_retries(partial(read_store, repo.store, repo.revision))
            if now.files == repo.files:
                faults += (str(error).rstrip("."),)
                continue
            if heads == MOST_HEADS:
                raise SnapshotError(
                    f"{repo.store.name} pruned {heads} snapshots, each while it was downloaded. "
                    "Let its run keep more of them (hub.keep), or upload less often "
                    "(hub.min_interval_seconds)."
                ) from error
            repo, left, faults, heads = now, folders(now), (), heads + 1
    raise NoneWhole(repo, faults)
