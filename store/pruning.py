"""What an upload may delete from a repo or a bucket: only files that a snapshot's manifest names.

Anybody may put other files there, even into the folder of a snapshot. Those stay.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from snapshot.disk.folder import MANIFEST, entries_in, parse_json
from snapshot.errors import SnapshotError
from store.latest import Latest, folders_in, remote_step
from store.store import Policy, RemoteFile, Store

LARGEST_MANIFEST_BYTES = 4 << 20
PARTS = r"(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
WEIGHTS = re.compile(rf"(adapter_)?model{PARTS}")
OPTIMIZER = re.compile(rf"optimizer{PARTS}")

Entries = Mapping[str, tuple[int, str]]
"""Size and SHA-256 by file name."""


class Manifests:
    """The manifests of the snapshots in a repo or a bucket, each downloaded at most once."""

    def __init__(self, remote: Store) -> None:
        self._remote = remote
        self._uploaded: dict[str, Entries] = {}
        """By folder, what this attempt has uploaded."""
        self._read: dict[tuple[str, RemoteFile], Entries | None] = {}
        """By folder and its manifest, what others have; None if it is no manifest."""
        self.digests: set[str] = set()
        """The SHA-256 of all files that the known manifests name."""

    def note(self, folder: str, entries: Entries) -> None:
        """Note that `folder` gets the files of a snapshot on this disk."""
        self._uploaded[folder] = entries
        self.digests.update(digest for _, digest in entries.values())

    def paths(self, commit: str, files: Mapping[str, RemoteFile], folder: str) -> list[str]:
        """The files of a commit that are in `folder` and named by its manifest, after that.

        Empty if there is no manifest of this project's format. Raises StoreError and OSError.
        """
        inside = f"{folder}/"
        if f"{inside}{MANIFEST}" not in files:
            return []
        there = {path: file for path, file in files.items() if path.startswith(inside)}
        found = _as_named(self._uploaded.get(folder), there, inside)
        if len(found) + 1 < len(there):  # not all is this attempt's
            entries = self.entries(commit, files, folder)
            if entries is None:
                return []
            found = _as_named(entries, there, inside)
        return [f"{inside}{MANIFEST}", *found]

    def entries(self, commit: str, files: Mapping[str, RemoteFile], folder: str) -> Entries | None:
        """The manifest of a folder as it is there; None without a valid one. Raises as `paths`."""
        path = f"{folder}/{MANIFEST}"
        file = files.get(path)
        if file is None or file.size > LARGEST_MANIFEST_BYTES:
            return None
        if (folder, file) not in self._read:
            self._read[folder, file] = entries = self._download(commit, path, file)
            self.digests.update(digest for _, digest in (entries or {}).values())
        return self._read[folder, file]

    def _download(self, commit: str, path: str, file: RemoteFile) -> Entries | None:
        try:
            return entries_in(parse_json(self._remote.read(commit, path, file.size), path), path)
        except SnapshotError:
            return None


def _is_as_named(file: RemoteFile, entry: tuple[int, str] | None) -> bool:
    """Whether a file is the one that a manifest names, as far as the listing tells."""
    if entry is None:
        return False
    size, digest = entry
    return file.size == size and file.sha256 in (digest, None)


def _as_named(entries: Entries | None, files: Mapping[str, RemoteFile], inside: str) -> list[str]:
    return [
        path
        for path, file in sorted(files.items())
        if _is_as_named(file, (entries or {}).get(path.removeprefix(inside)))
    ]


def folders_to_delete(
    files: Iterable[str], latest: Latest, before: Latest | None, policy: Policy
) -> list[str]:
    """Folders of whole snapshots beyond the newest `policy.keep`, of which `latest` is one.

    Milestones, the best and snapshots of later steps stay: another attempt took these. All stay if
    there was no latest.json to tell which run they belong to, and none of another run that was
    taken over.
    """
    others = [folder for folder in folders_in(files) if folder != latest.folder]
    if before is None:
        return []
    if before.run_id != latest.run_id:
        return others
    old = [folder for folder in others if remote_step(folder) <= latest.step][policy.keep - 1 :]
    return [
        folder
        for folder in old
        if not policy.is_milestone(step := remote_step(folder)) and step != latest.best_step
    ]


def weights_in_another_split(
    files: Mapping[str, RemoteFile],
    new: Collection[str],
    manifests: Manifests,
    before: Latest | None,
    parent: str,
) -> list[str]:
    """Weights at the top that are those of the snapshot before, and not among `new` paths.

    Raises as `Manifests.paths`.
    """
    left = [path for path in files if WEIGHTS.fullmatch(path) and path not in new]
    if before is None or not left:
        return []
    entries = manifests.entries(parent, files, before.folder) or {}
    return [path for path in left if _is_as_named(files[path], entries.get(path))]
