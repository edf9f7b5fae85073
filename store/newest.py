"""The newest whole snapshot of a repo, which its run may prune while it is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from snapshot.errors import DiskFault, OtherRun, SnapshotError
from store.errors import HubNoFile, HubNoRevision
from store.fetch import RepoContents, read_repo
from store.retries import with_retries

MOST_HEADS = 10
"""After so many, each pruned while it was downloaded, a reader ends."""
Download = Callable[[RepoContents, str], Path]
"""Downloads a snapshot of a repo, by its folder there; returns its folder here."""


class NoneWhole(SnapshotError):
    """A repo has no whole snapshot."""

    def __init__(self, repo: RepoContents, faults: tuple[str, ...]) -> None:
        reasons = "; ".join(dict.fromkeys(faults))
        what = f"none of the snapshots in {repo.name} is whole: {reasons}."
        super().__init__(what if faults else f"there is no snapshot in {repo.name}.")
        self.repo, self.faults = repo, faults


@dataclass(frozen=True)
class Fetched:
    """A whole snapshot of a repo, on this disk."""

    path: Path
    repo: RepoContents
    """The repo as it was when the snapshot was in it."""
    folder: str
    """Where it is there."""
    faults: tuple[str, ...]
    """What is wrong with the newer ones, without full stops."""


def newest_whole(
    repo: RepoContents,
    download: Download,
    folders: Callable[[RepoContents], list[str]] = RepoContents.folders,
) -> Fetched:
    """Download the first of `folders` that is whole.

    If one is not, the repo is read again: a snapshot that was pruned meanwhile has a successor.
    Raises NoneWhole, HubError, and what `download` raises about this disk or another run.
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
        except (SnapshotError, HubNoFile, HubNoRevision) as error:
            now = _read_again(repo)
            if now.files == repo.files:
                faults += (str(error).rstrip("."),)
                continue
            if heads == MOST_HEADS:
                raise SnapshotError(
                    f"{repo.hub.name} pruned {heads} snapshots, each while it was downloaded. Let "
                    "its run keep more of them (hub.keep), or upload less often "
                    "(hub.min_interval_seconds)."
                ) from error
            repo, left, faults, heads = now, folders(now), (), heads + 1
    raise NoneWhole(repo, faults)


def _read_again(repo: RepoContents) -> RepoContents:
    return with_retries(repo.hub, lambda: read_repo(repo.hub, repo.revision))
