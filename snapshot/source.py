"""What a name of a model or snapshot means: a folder of this disk, or a store.

A name is a folder (of a run, of snapshots, of one snapshot, of any other model), a repo of the Hub
(owner/name, owner/name@revision) or a URL (hf://..., s3://..., file://...). After a store, @ and
the folder that `python -m snapshot list` prints name one of its snapshots.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common.retries import with_retries
from data.tokenizer import TOKENIZER_FILES
from data.tokenizer_files import CHAT_TEMPLATE, CONFIG, GENERATION, MORE_TEMPLATES
from snapshot.disk.checking import check_snapshot
from snapshot.disk.folder import (
    expanded,
    names_in,
    newest_verified,
    snapshot_folders,
    snapshots_in,
    visible,
)
from snapshot.errors import DiskFault, OtherRun, SnapshotError
from store.errors import StoreError, StoreUnreachable
from store.fetch import (
    ALL,
    INFERENCE,
    Fetched,
    StateCheck,
    download,
    fetch_newest,
    read_store,
)
from store.hub import Hub
from store.kinds import named_store
from store.latest import SNAPSHOTS
from store.store import BRANCH, PREFIX, Contents

WITHOUT_OWNER = re.compile(rf"(?:{PREFIX})?([A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
"""The name of a repo from before the Hub's repos had owners, such as gpt2."""
TIMEOUT_SECONDS = 60.0
SMALL_FILE = re.compile(
    "|".join(map(re.escape, (CONFIG, *TOKENIZER_FILES, CHAT_TEMPLATE, GENERATION)))
    + rf"|{MORE_TEMPLATES}/[^/]+\.jinja"
)
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Files of a whole model that hold weights."""


@dataclass(frozen=True)
class Source:
    """Where a name leads: to a `path` of this disk, or to a store with these `contents`."""

    path: Path | None = None
    contents: Contents | None = None

    @property
    def has_snapshots(self) -> bool:
        """Whether snapshots of a run are in it."""
        if self.contents is not None:
            return bool(self.contents.folders())
        return self.folders() != [self.path]

    def names(self) -> Collection[str]:
        """The paths of its files in the store, or the names of those in the folder."""
        if self.contents is not None:
            return self.contents.files.keys()
        return names_in(self.path) if self.path is not None and self.path.is_dir() else ()

    def folders(self) -> list[Path]:
        """The snapshots of a run on this disk, newest first, or the folder itself."""
        if (path := self.path) is None:
            return []
        return snapshot_folders(snapshots_in(path)) or snapshot_folders(path) or [path]

    def fetch(
        self,
        root: Path | None = None,
        wanted: re.Pattern[str] = ALL,
        refuse: StateCheck | None = None,
    ) -> Fetched:
        """The newest whole snapshot, downloaded as `fetch_newest` does if it is in a store.

        Raises SnapshotError if there is none, and StoreError.
        """
        if self.contents is not None:
            return fetch_newest(self.contents, root, wanted, refuse)
        newest, faults = newest_verified(self.folders(), check_snapshot)
        if newest is None:
            raise SnapshotError(f"{self.path} has no whole snapshot: {'; '.join(faults)}")
        return Fetched(newest)

    def fetch_model(self, wanted: re.Pattern[str]) -> Fetched:
        """The model in it: of a run as `fetch` does, or the files of any other.

        `wanted` is SMALL for configuration and tokenizer, or INFERENCE. Raises SnapshotError if
        there is none or a file is damaged, and StoreError.
        """
        if self.has_snapshots:
            return self.fetch(wanted=wanted)
        if self.contents is None:
            return Fetched(self.path or Path())
        digests = {
            name: file.sha256
            for name, file in self.contents.files.items()
            if SMALL_FILE.fullmatch(name) or (wanted is INFERENCE and WEIGHTS.fullmatch(name))
        }
        return Fetched(with_retries(partial(download, self.contents, digests)), self.contents)


def find(name: str, timeout: float = TIMEOUT_SECONDS, any_model: bool = False) -> Source:
    """What `name` means; `any_model` may be a repo without an owner, such as gpt2.

    What exists on this disk is a path. Raises SnapshotError if it is nothing or may be a misspelled
    path, and StoreError if its store cannot be read in `timeout` seconds a request.
    """
    path = visible(expanded(name))
    if path.exists():
        return Source(path)
    store, at, folder = name.partition(f"@{SNAPSHOTS}/")
    place = named_store(store, timeout)
    if place is not None and at:
        place = place[0], f"{SNAPSHOTS}/{folder}"
    if place is None and any_model and (match := WITHOUT_OWNER.fullmatch(name)) is not None:
        place = Hub(match[1], timeout), match[2] or BRANCH
    if place is None:
        raise SnapshotError(
            f"{name} is neither a folder that exists nor a repo of the Hub (owner/name or "
            "owner/name@revision) nor a URL."
        )
    return Source(contents=with_retries(lambda: read_store(*place)))


@contextmanager
def naming(named: str, remedy: str = "") -> Iterator[None]:
    """Begin errors with what was named; those of a store that last are user errors.

    They end with `remedy`.
    """
    try:
        yield
    except (OtherRun, DiskFault):
        raise
    except StoreUnreachable as error:
        raise StoreUnreachable(
            f"{named}: {str(error).rstrip('.')}. Start again when it can be reached."
        ) from error
    except (StoreError, SnapshotError) as error:
        if str(error).startswith(named):
            raise
        raise SnapshotError(f"{named}: {str(error).rstrip('.')}.{remedy}") from error
