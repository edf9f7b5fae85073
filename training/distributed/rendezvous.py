"""How the processes of a run find each other, also after a restart of all of them.

accelerate has no interface for this, so the file uses torch.distributed itself.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

ARRIVAL_SECONDS = 0.02
"""How often the main process looks for the others at the start."""


def fresh_store(timeout: timedelta) -> tuple[Store, int, int]:
    """The store through which processes find each other, this one's rank, and their number.

    The launcher keeps its store when it restarts the processes, and torch 2.13 writes the same keys
    into it each time. A process that starts a little before another then reads the address of a
    dead one, and with three or more processes nearly every restart hangs or fails. So the main
    process gives all processes that are alive now a prefix that nobody has written to.
    """
    from torch.distributed import PrefixStore, rendezvous

    store, rank, processes = next(rendezvous("env://", timeout=timeout))
    own = uuid.uuid4().hex  # identifies this process in this start
    store.set(f"here/{rank}", own)
    if rank > 0:
        prefix = store.get(f"answer/{own}").decode()  # waits
        store.set(f"known/{prefix}/{own}", "")
    else:
        prefix = own
        _answer_all(store, processes, prefix, time.monotonic() + timeout.total_seconds())
    return PrefixStore(prefix, store), rank, processes


def _answer_all(store: Store, processes: int, prefix: str, end: float) -> None:
    """Send the prefix until every process of this start, and not of an earlier one, has it.

    Raises ConnectionError when a process has not arrived at the time `end`.
    """
    others = [f"here/{rank}" for rank in range(1, processes)]
    missing = set(others)
    while missing:
        for key in sorted(missing):
            if not store.check([key]):
                continue
            other = store.get(key).decode()
            store.set(f"answer/{other}", prefix)
            if store.check([f"known/{prefix}/{other}"]):
                missing.remove(key)
        if missing and time.monotonic() > end:
            ranks = ", ".join(sorted(key.removeprefix("here/") for key in missing))
            raise ConnectionError(f"the processes {ranks} of {processes} did not arrive")
        time.sleep(ARRIVAL_SECONDS)
