"""`snapshot.resume=never`: start over once; the existing run directory is moved aside."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from snapshot.disk.files import snapshot_folders, unused_name
from snapshot.disk.state import RunState, read_state
from snapshot.errors import SnapshotError
from snapshot.start import Start
from snapshot.store import Store, start_in_empty_repo
from store.errors import HubError
from store.fetch import fetch_state, read_repo

METRICS = "metrics.jsonl"
"""In a run's directory: the metrics of its steps."""
AS_ASKED = "the beginning, as snapshot.resume=never asks"
RESUMES_INSTEAD = (
    "this same command began the run with snapshot.resume=never, and it has not finished, so it "
    "resumes. To start over instead, move {run_dir} away, or give another run.name (and run.dir, "
    "if that is set); with a repo or a bucket, name another one as well."
)


def newest_state(root: Path, store: Store | None, use_local: bool) -> RunState | None:
    """The state of this run's newest snapshot on this disk, else in its repo; None without.

    Only `state.json` is read: the rest of the snapshot is neither fetched nor verified.
    """
    local = snapshot_folders(root) if use_local else []
    for folder in local:
        with suppress(SnapshotError):
            return read_state(folder)
    if store is None or local:
        return None
    with suppress(SnapshotError, HubError, OSError), store.hub.waiting.limit():
        repo = read_repo(store.hub)
        if repo.latest is not None:
            return fetch_state(repo, repo.latest.folder)
    return None


def has_steps(run_dir: Path) -> bool:
    """Whether a run has recorded metrics in its directory, with or without snapshots."""
    with suppress(OSError):
        return (run_dir / METRICS).stat().st_size > 0
    return False


def check_can_move_aside(run_dir: Path, needed: Iterable[tuple[str, str]] = ()) -> None:
    """Raise SnapshotError if `run_dir` holds more than a run, so that it must not be moved.

    `needed` are keys of the configuration and what they name: paths, or anything else.
    """
    folder = run_dir.resolve()
    others = {"the working folder": Path.cwd(), "this project": Path(__file__).parent}
    with suppress(RuntimeError):  # a user without a home
        others["your home"] = Path.home()
        others |= {f"{key}={value}": Path(value).expanduser() for key, value in needed}
    for name, other in others.items():
        if other.resolve().is_relative_to(folder):
            raise SnapshotError(
                f"snapshot.resume=never would move run.dir={run_dir} aside, and {name} with it. "
                "Give the run a folder of its own, such as run.dir=out/new."
            )


def start_over(run_dir: Path, root: Path, store: Store | None, again: bool = False) -> Start:
    """Move the run's directory aside if it holds a run. Nothing is deleted.

    It stays if this command starts `again` what it began itself and has no snapshot of.
    Raises SnapshotError if it cannot be moved, or if the run's own repo holds a run.
    """
    start = Start(None, None, "")
    if store is not None:
        start = start_in_empty_repo(store)
    if not has_steps(run_dir) and not snapshot_folders(root):
        return replace(start, reason=AS_ASKED)
    if again and not snapshot_folders(root):
        return replace(start, reason=f"{AS_ASKED}: the attempt before had no snapshot yet")
    folder = run_dir.resolve()  # of a link, the target moves, and is created again
    aside = unused_name(folder)
    try:
        folder.rename(aside)
    except OSError as error:
        raise SnapshotError(
            f"snapshot.resume=never, but {run_dir} cannot be moved to {aside}: {error.strerror}. "
            "Move its content yourself, or give the run another run.dir."
        ) from error
    return replace(
        start,
        reason=f"{AS_ASKED}; the earlier run is now {aside}",
    )
