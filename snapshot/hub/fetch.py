"""Snapshots from the Hub to this disk: found, listed, downloaded and verified before they are used.

Only names that a manifest may have are taken, only at the sizes that the manifest says, into a
folder that appears when all of it is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from snapshot.disk.contents import check_model
from snapshot.disk.files import (
    MANIFEST,
    SNAPSHOT_NAME,
    atomic_folder,
    folder_name,
    manifest_entries,
    remove_folder,
)
from snapshot.disk.numbers import NumberChecks
from snapshot.disk.reading import check_file
from snapshot.disk.state import check_snapshot
from snapshot.errors import SnapshotError
from snapshot.hub.client import BRANCH, Hub, RemoteFile
from snapshot.hub.latest import LATEST, SNAPSHOTS, Latest

LARGEST_MANIFEST_BYTES = 4 << 20
OWN_FILES = {"README.md", ".gitattributes"}
"""What a repo may hold that is to become a run's."""
PARTIAL = ".download"
NOT_FOR_SAMPLING = ("optimizer", "state.json")


@dataclass(frozen=True)
class RepoContents:
    """A repo as of one commit."""

    hub: Hub
    commit: str
    private: bool
    files: dict[str, RemoteFile]
    latest: Latest | None
    fault: str | None = None
    """What is wrong with its latest.json."""

    @property
    def name(self) -> str:
        """Repo and commit, for people."""
        return f"{self.hub.repo_id}@{self.commit[:8]}"

    def folders(self) -> list[str]:
        """The snapshots there, the one of latest.json first, then from the newest."""
        found = folders_in(self.files)
        if self.latest is not None and self.latest.folder in found:
            found.remove(self.latest.folder)
            found.insert(0, self.latest.folder)
        return found

    def foreign_file(self) -> str | None:
        """A file that no run put there; None in the repo of a run, and in a new one."""
        others = sorted(set(self.files) - OWN_FILES)
        return others[0] if others and LATEST not in self.files else None


def read_repo(hub: Hub, revision: str = BRANCH) -> RepoContents:
    """What a repo holds. Raises HubError."""
    commit, private = hub.head(revision)
    files = hub.files(commit)
    try:
        latest = hub.latest(commit, files)
    except SnapshotError as error:
        return RepoContents(hub, commit, private, files, None, str(error))
    return RepoContents(hub, commit, private, files, latest)


def foreign_file_message(hub: Hub, file: str) -> str:
    """Why a repo that holds such a file is left alone."""
    return (
        f"hub.repo_id={hub.repo_id} holds {file}, which no run of this project put there. Name a "
        "repo that is new or empty."
    )


def folders_in(paths: Iterable[str]) -> list[str]:
    """The snapshot folders among the paths of a repo, newest first."""
    found = set()
    for path in paths:
        top, _, rest = path.partition("/")
        name = rest.partition("/")[0]
        if top == SNAPSHOTS and SNAPSHOT_NAME.fullmatch(name):
            found.add(f"{SNAPSHOTS}/{name}")
    return sorted(found, key=remote_step, reverse=True)


def remote_step(folder: str) -> int:
    """The step of `snapshots/step-00000100`."""
    match = SNAPSHOT_NAME.fullmatch(folder.removeprefix(f"{SNAPSHOTS}/"))
    assert match is not None, folder
    return int(match[1])


def fetch(remote: RepoContents, folder: str, root: Path) -> Path:
    """Download a snapshot of a repo's commit below `root` and verify it; where it then lies.

    Raises SnapshotError where it is not a good one, HubError where it does not come.
    """
    partial = root / PARTIAL
    try:
        try:
            downloaded = _checked(remote, folder, partial)
        except SnapshotError:  # perhaps on the way: once more, all of it
            remove_partial(root)
            downloaded = _checked(remote, folder, partial)
        final = root / folder_name(remote_step(folder))
        with atomic_folder(root, final.name) as building:
            for path in downloaded.iterdir():
                path.rename(building / path.name)
        remove_partial(root)
        return final
    except SnapshotError:
        remove_partial(root)
        raise
    except OSError as error:
        raise SnapshotError(
            f"{folder} of {remote.name} cannot be put into {root}: {error.strerror}. Make room, or "
            "name another run.dir."
        ) from error


def remove_partial(root: Path) -> None:
    """Remove what has come of a download that did not end; until then the next goes on with it."""
    if (root / PARTIAL).exists():
        remove_folder(root / PARTIAL)


def fetch_for_sampling(remote: RepoContents, folder: str) -> Path:
    """The files of a snapshot that sampling needs, verified, in the Hub client's own cache.

    There equal files of several commits take their room once, and `hf cache` shows and removes
    them. Files that were damaged there are downloaded again. Raises as `fetch` does.
    """
    try:
        try:
            return _cached(remote, folder)
        except SnapshotError:
            return _cached(remote, folder, again=True)
    except OSError as error:
        raise SnapshotError(
            f"{folder} of {remote.name} cannot be kept in the Hub client's cache: "
            f"{error.strerror}. Make room there, or set HF_HOME to another folder."
        ) from error


def _cached(remote: RepoContents, folder: str, again: bool = False) -> Path:
    downloaded = _downloaded(remote, folder, None, is_for_sampling, again)
    numbers = NumberChecks()
    for name, (_, digest) in manifest_entries(downloaded).items():
        if is_for_sampling(name):
            check_file(
                downloaded / name, digest, numbers.inspector_for, f"{folder} of {remote.name}"
            )
    check_model(downloaded)
    return downloaded


def newest_for_sampling(hub: Hub, revision: str) -> Path:
    """`fetch_for_sampling` of the newest snapshot that is whole. Raises as `fetch` does."""
    remote = read_repo(hub, revision)
    faults = []
    for folder in remote.folders():
        try:
            return fetch_for_sampling(remote, folder)
        except SnapshotError as error:
            faults.append(str(error))
    raise SnapshotError(
        f"{remote.name} has no whole snapshot: {'; '.join(faults) or 'it holds none at all'}."
    )


def is_for_sampling(name: str) -> bool:
    """Whether a file of a snapshot is needed to speak."""
    return not name.startswith(NOT_FOR_SAMPLING)


def _downloaded(
    remote: RepoContents,
    folder: str,
    place: Path | None,
    wanted: Callable[[str], bool] = lambda name: True,
    again: bool = False,
) -> Path:
    """The wanted files of a snapshot below `place`, of the sizes that manifest and listing say.

    Without `place`, in the Hub client's cache; with `again`, what is there is replaced.
    """
    inside = f"{folder}/"
    listed = {
        path.removeprefix(inside): file
        for path, file in remote.files.items()
        if path.startswith(inside)
    }
    manifest = listed.pop(MANIFEST, None)
    if manifest is None or manifest.size > LARGEST_MANIFEST_BYTES:
        raise SnapshotError(f"{folder} of {remote.name} has no {MANIFEST} of a sensible size")
    downloaded = remote.hub.download(remote.commit, inside + MANIFEST, place, again).parent
    entries = manifest_entries(downloaded)
    if unlisted := sorted(set(listed) ^ set(entries)):
        raise SnapshotError(f"{folder} of {remote.name}: {unlisted[0]} is not there, or too much")
    for name, (size, digest) in entries.items():
        if listed[name].size != size or listed[name].sha256 not in (digest, None):
            raise SnapshotError(f"{folder} of {remote.name}: {name} is not as its manifest says")
    for name in filter(wanted, sorted(entries)):
        remote.hub.download(remote.commit, inside + name, place, again)
    return downloaded


def _checked(remote: RepoContents, folder: str, place: Path) -> Path:
    """All files of a snapshot below `place`, verified."""
    try:
        downloaded = _downloaded(remote, folder, place)
        state = check_snapshot(downloaded)
    except SnapshotError as error:  # where it lay for a moment helps nobody
        inside = str(place / folder)
        raise SnapshotError(str(error).replace(inside, f"{folder} of {remote.name}")) from error
    if state.step != remote_step(folder):
        raise SnapshotError(f"{folder} of {remote.name} holds another step than its name says")
    return downloaded
