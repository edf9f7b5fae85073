"""Reads a store: what it holds at one moment, and downloads, verified before they are used.

Only files whose names a manifest may list are downloaded, and only if they have the manifest's
sizes. A snapshot becomes visible here when all of it is verified.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

from huggingface_hub import constants

from common.retries import with_retries
from snapshot.disk.checking import check_contents, check_model
from snapshot.disk.folder import (
    HASHING_THREADS,
    MANIFEST,
    TEMPORARY_PREFIX,
    atomic_folder,
    entries_in,
    folder_name,
    make_way,
    parse_json,
    remove_folder,
    sha256_of,
)
from snapshot.disk.state import STATE, RunState, read_state
from snapshot.errors import DiskFault, OtherRun, SnapshotError, is_full
from store.errors import NoFile, NoRevision
from store.latest import FOLDER, LARGEST_METRICS_BYTES, METRICS, remote_step
from store.store import BRANCH, Contents, Store

PARTIAL = f"{TEMPORARY_PREFIX}download"
"""The folder of an unfinished download, below the snapshots. A start removes it."""
ALL = re.compile(r".+")
INFERENCE = re.compile(r"(?!optimizer).+")
SMALL = re.compile(r".+(?<!\.safetensors)")
"""The files of a snapshot without tensors: state, configuration, tokenizer."""
MOST_HEADS = 10
"""After so many, of each of which a snapshot was pruned during its download, a reader ends."""
StateCheck = Callable[[RunState], object]
"""Raises SnapshotError for the state of a snapshot that an attempt must not resume from."""


def read_store(store: Store, revision: str = BRANCH) -> Contents:
    """Read the contents of a store; `revision` may be a snapshot's folder. Raises StoreError."""
    is_folder = FOLDER.fullmatch(f"{revision}/{MANIFEST}") is not None
    head = store.head(BRANCH if is_folder else revision)
    if not is_folder:
        return replace(head, revision=revision)
    inside = {path: head.files[path] for path in head.files if path.startswith(f"{revision}/")}
    return replace(head, files=inside, latest=None, fault=None, revision=revision)


def download(
    contents: Contents, digests: Mapping[str, str | None], target: Path | None = None
) -> Path:
    """Download files to their paths below `target`, or a cache, and verify them; that folder.

    `digests` has the SHA-256 of each, or None where the store tells none. What is damaged, here or
    in transit, is downloaded again. Raises SnapshotError if that does not help, StoreError, and
    OSError for a folder that cannot be written.
    """

    def damaged() -> list[str]:
        known = [path for path, digest in digests.items() if digest]
        with ThreadPoolExecutor(HASHING_THREADS) as pool:
            of_files = pool.map(sha256_of, (here / path for path in known))
            return [path for path, now in zip(known, of_files, strict=True) if now != digests[path]]

    # Without commits a file may have been replaced, and no digest tells: no copy is trusted.
    again = not contents.store.has_commits and None in digests.values()
    here = contents.store.fetch(contents, digests, target, again)
    if paths := damaged():
        contents.store.fetch(contents, paths, target, again=True)
    if paths and (paths := damaged()):
        raise SnapshotError(f"{contents.name}: the content of {paths[0]} has changed")
    return here


def fetch_metrics(contents: Contents, folder: Path) -> Path | None:
    """Download the metrics that a store has to `folder`; None if it has none.

    Their lines have not been checked. Raises SnapshotError for a file that is too large, StoreError
    and OSError if the download fails.
    """
    if METRICS not in contents.files:
        return None
    if (size := contents.files[METRICS].size) > LARGEST_METRICS_BYTES:
        raise SnapshotError(f"{METRICS} of {contents.name} has {size:,} bytes")
    return contents.store.fetch(contents, [METRICS], folder) / METRICS


def fetch(
    contents: Contents,
    folder: str,
    root: Path | None = None,
    wanted: re.Pattern[str] = ALL,
    refuse: StateCheck | None = None,
) -> Path:
    """Download the `wanted` files of a snapshot and verify them; returns their folder here.

    All of it becomes a snapshot of `root`. A part of it stays in a hidden folder of `root`, which a
    start removes; without `root`, in a cache. For a run that wants to resume, `refuse` may raise
    OtherRun for its state, before anything else is downloaded.

    Raises SnapshotError if it is not valid even when it is downloaded again, DiskFault if this disk
    refuses it, StoreError if the download fails.
    """
    place, target = f"{folder} of {contents.name}", None if root is None else root / PARTIAL
    try:
        digests = _digests(contents, folder, place)
        if refuse is not None:
            of_state = {f"{folder}/{STATE}": digests[STATE]}
            state = read_state(download(contents, of_state, target) / folder)
            _check_state(contents, place, remote_step(folder), state)
            refuse(state)
        named = {
            f"{folder}/{name}": digest
            for name, digest in digests.items()
            if wanted.fullmatch(name) or name == MANIFEST
        }
        here = download(contents, named, target) / folder
        if wanted is ALL:
            check_contents(here)
        elif wanted is INFERENCE:
            check_model(here)
        if root is None or wanted is not ALL:
            return here
        final = root / folder_name(remote_step(folder))
        with atomic_folder(root, final.name, make_way) as building:
            for name in digests:
                (here / name).rename(building / name)
        remove_folder(root / PARTIAL)
        return final
    except SnapshotError as error:
        if target is None:
            raise
        if target.exists():  # the next try must not continue it
            remove_folder(target)
        raise type(error)(str(error).replace(str(target / folder), place)) from error
    except OSError as error:
        remedy = "Free some space there" if is_full(error) else "Make that folder writable"
        remedy += "" if root else ", or set HF_HOME to another"
        raise DiskFault(
            f"{place} cannot be written to {root or constants.HF_HOME}: {error.strerror}. {remedy}."
        ) from error


def _digests(contents: Contents, folder: str, place: str) -> dict[str, str]:
    """The SHA-256 of each file of a snapshot, by its name, as its manifest says.

    Raises SnapshotError unless the store lists these files, as far as the listing tells.
    """
    inside = f"{folder}/"
    files = contents.files.items()
    listed = {path.removeprefix(inside): file for path, file in files if path.startswith(inside)}
    if MANIFEST not in listed:
        raise SnapshotError(f"{place} has no {MANIFEST}")
    manifest = contents.store.read(contents, inside + MANIFEST)
    entries = entries_in(parse_json(manifest, f"{MANIFEST} of {place}"), place)
    if missing := sorted({STATE, *entries} - (listed.keys() & entries.keys())):
        raise SnapshotError(f"{place}: {missing[0]} is missing, or not in the manifest")
    for name, (size, digest) in entries.items():
        if listed[name].size != size or listed[name].sha256 not in (digest, None):
            raise SnapshotError(f"{place}: {name} is not as its manifest says")
    digests = {name: digest for name, (_, digest) in entries.items()}
    return {**digests, MANIFEST: sha256(manifest).hexdigest()}


def _check_state(contents: Contents, place: str, step: int, state: RunState) -> None:
    """Raise SnapshotError for the state of another step or run than the store says."""
    if state.step != step:
        raise SnapshotError(f"{place} holds another step than its name says")
    if contents.latest is not None and state.run_id != contents.latest.run_id:
        raise SnapshotError(f"{place} belongs to another run")


class NoneWhole(SnapshotError):
    """A store has no whole snapshot."""

    def __init__(self, contents: Contents, faults: tuple[str, ...]) -> None:
        what = f"there is no snapshot in {contents.name}"
        reasons = [contents.fault] if contents.fault else []
        if faults:
            what, reasons = f"none of the snapshots in {contents.name} is whole", [*faults]
        super().__init__(": ".join(filter(None, [what, "; ".join(dict.fromkeys(reasons))])) + ".")
        self.faults = faults


@dataclass(frozen=True)
class Fetched:
    """A whole snapshot, on this disk."""

    path: Path
    contents: Contents | None = None
    """The store as it was when the snapshot was in it; None if it was on this disk before."""
    folder: str = ""
    """Where it is in the store."""
    faults: tuple[str, ...] = ()
    """What is wrong with the newer ones, without full stops."""

    @property
    def name(self) -> str:
        """Where it was found, for messages."""
        return str(self.path) if self.contents is None else f"{self.contents.name} {self.folder}"


def fetch_newest(
    contents: Contents,
    root: Path | None = None,
    wanted: re.Pattern[str] = ALL,
    refuse: StateCheck | None = None,
    after: int = -1,
) -> Fetched:
    """`fetch` the newest snapshot of a store that is whole and of a later step than `after`.

    Where one is not whole, the store is read again: one that was pruned meanwhile has a successor.
    Raises NoneWhole, DiskFault, StoreError, and what `refuse` raises.
    """
    run_id = None if contents.latest is None else contents.latest.run_id
    for _ in range(MOST_HEADS):
        faults: tuple[str, ...] = ()
        for folder in contents.folders():
            if remote_step(folder) <= after:
                continue
            try:
                path = with_retries(partial(fetch, contents, folder, root, wanted, refuse))
                return Fetched(path, contents, folder, faults)
            except (DiskFault, OtherRun):
                raise
            except (SnapshotError, NoFile, NoRevision) as error:
                faults = (*faults, str(error).rstrip("."))
                now = with_retries(partial(read_store, contents.store, contents.revision))
                if now.files != contents.files:
                    break
        else:
            break
        contents = now
        if run_id and (now.latest is None or now.latest.run_id != run_id):
            faults = ("another run has replaced this one",)
            break
    raise NoneWhole(contents, faults)
