"""The model repo that gets the last snapshot of a run whose store is a bucket."""

from __future__ import annotations

from dataclasses import replace

from snapshot.errors import SnapshotError
from snapshot.start import Start
from snapshot.store import Store, open_repo


def check_model_repo(store: Store, start: Start) -> Start:
    """Check at the start that a run's last snapshot can go to a repo, which is not its store.

    Returns the start, with a warning if the repo cannot be read. Raises SnapshotError if it holds
    something else or another run; HubError if it is refused and this disk has no snapshot.
    """
    repo, faults = open_repo(store, can_do_without=start.folder is not None, is_new=True)
    latest = None if repo is None else repo.latest
    mine = start.state is not None and latest is not None and latest.run_id == start.state.run_id
    if latest is not None and not mine and not store.takeover:
        raise SnapshotError(
            f"{store.key}, which gets the last snapshot, holds another run, at step {latest.step}. "
            "Name another repo; hub.takeover=true replaces what is in this one."
        )
    return replace(start, warnings=start.warnings + faults)
