"""`snapshot.resume=never`: a run starts over, once, and what is in its directory is moved aside."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from snapshot.disk.files import LARGEST_JSON_BYTES, snapshot_folders
from snapshot.disk.state import STATE, RunState, read_state
from snapshot.errors import SnapshotError
from snapshot.hub.errors import HubError
from snapshot.hub.fetch import look_at
from snapshot.start import Start
from snapshot.store import Store, begin_in

METRICS = "metrics.jsonl"
"""In a run's directory: its steps so far."""
GOES_ON = (
    "this same command began the run with snapshot.resume=never, and it has not ended: it resumes. "
    "To start over all the same, name another run.name, or move {run_dir} away and name another "
    "hub.repo_id, if there is one."
)


def state_at_hand(root: Path, store: Store | None, here: bool) -> RunState | None:
    """The state of this run's newest snapshot here, or else in its repo; None without.

    It is read alone: nothing else of the snapshot is fetched or verified.
    """
    local = snapshot_folders(root) if here else []
    for folder in local:
        with suppress(SnapshotError):
            return read_state(folder)
    if store is None or local:
        return None
    with suppress(SnapshotError, HubError), TemporaryDirectory() as fetched:
        remote = look_at(store.hub)
        path = f"{remote.latest.folder}/{STATE}" if remote.latest is not None else ""
        if path in remote.files and remote.files[path].size <= LARGEST_JSON_BYTES:
            return read_state(store.hub.download(remote.commit, path, Path(fetched)).parent)
    return None


def refuse_to_move(run_dir: Path) -> None:
    """Raise SnapshotError where moving a run's directory would take more than a run along."""
    place = run_dir.resolve()
    others = {"the working folder": Path.cwd(), "this project": Path(__file__).parent}
    with suppress(RuntimeError):  # a user without one
        others["your home"] = Path.home()
    for name, other in others.items():
        if other.resolve().is_relative_to(place):
            raise SnapshotError(
                f"snapshot.resume=never would move run.dir={run_dir} aside, and {name} with it. "
                "Give the run a folder of its own, such as run.dir=out/new."
            )


def start_over(run_dir: Path, root: Path, store: Store | None) -> Start:
    """Move what is in the run's directory aside, where there is a run; nothing is deleted.

    Raises SnapshotError where it cannot be moved, or the run's own repo holds a run.
    """
    begun = Start(None, None, "")
    if store is not None:
        begun = begin_in(store)
    if not (run_dir / METRICS).exists() and not snapshot_folders(root):
        return replace(begun, reason="the beginning, as snapshot.resume=never asks")
    place = run_dir.resolve()  # through a link: it is the folder that moves, and is made anew
    number = 1
    while (aside := place.with_name(f"{place.name}.old-{number}")).exists():
        number += 1
    try:
        place.rename(aside)
    except OSError as error:
        raise SnapshotError(
            f"snapshot.resume=never, but {run_dir} cannot be moved to {aside}: {error.strerror}. "
            "Move what is in it yourself, or give the run another run.dir."
        ) from error
    return replace(
        begun,
        reason=f"the beginning, as snapshot.resume=never asks; the earlier run is now {aside}",
    )
