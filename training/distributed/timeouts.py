"""The other processes when they do not answer: how long to wait, and how their loss looks.

torch alone knows both, so this file talks to it past the accelerator.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

from accelerate import Accelerator

from config.schema import RunConfig

if TYPE_CHECKING:
    from torch.distributed import Store

LOST = (
    "DistNetworkError",  # torch's store
    "DistStoreError",
    "Timed out waiting",  # gloo
    "timed out connecting",
    "Connect timeout",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Application timeout caused pair closure",
    "ncclRemoteError",
    "remote process exited",
    "Watchdog caught collective operation timeout",
)
"""What is in the words of an error of torch's that is only the echo of another process's end."""
ARRIVAL_SECONDS = 0.02
"""How often the main process looks for the others at the start."""


def fresh_store(timeout: timedelta) -> tuple[Store, int, int]:
    """The store by which processes find each other, this one's rank, and how many there are.

    The launcher keeps its store over a restart of the processes, and torch 2.13 writes the same
    keys into it each time. A process that starts a little sooner than another then reads the
    address of a dead one, and from three on nearly every restart hangs or fails. So the main
    process tells all that are there now a part of the store that nobody has written into.
    """
    from torch.distributed import PrefixStore, rendezvous

    store, rank, processes = next(rendezvous("env://", timeout=timeout))
    own = uuid.uuid4().hex  # of this process, in this start
    store.set(f"here/{rank}", own)
    if rank > 0:
        part = store.get(f"answer/{own}").decode()  # waits
        store.set(f"known/{part}/{own}", "")
    else:
        part = own
        _answer_all(store, processes, part, time.monotonic() + timeout.total_seconds())
    return PrefixStore(part, store), rank, processes


def _answer_all(store: Store, processes: int, part: str, end: float) -> None:
    """Tell every process the part, until each that is here now, not an earlier start's, has it."""
    others = [f"here/{rank}" for rank in range(1, processes)]
    missing = set(others)
    while missing:
        for key in sorted(missing):
            if not store.check([key]):
                continue
            other = store.get(key).decode()
            store.set(f"answer/{other}", part)
            if store.check([f"known/{part}/{other}"]):
                missing.remove(key)
        if missing and time.monotonic() > end:
            ranks = ", ".join(sorted(key.removeprefix("here/") for key in missing))
            raise ConnectionError(f"the processes {ranks} of {processes} did not arrive")
        time.sleep(ARRIVAL_SECONDS)


class ProcessGroupTimeouts:
    """How long this process waits for the others: short in a step, long where one of them works.

    A machine that is cut off says nothing, so only the time tells it from a slow one. Before the
    first step the others may prepare a text, fetch a snapshot or compile; around a snapshot they
    wait for the process that writes it.
    """

    def __init__(self, accelerator: Accelerator, run: RunConfig) -> None:
        """Long from now on."""
        self._alone = accelerator.num_processes == 1
        self._short = timedelta(seconds=run.collective_timeout_seconds)
        self._long = timedelta(
            seconds=max(run.start_timeout_seconds, run.collective_timeout_seconds)
        )
        self.relax()  # hybrid sharding's own groups were not made so

    def relax(self) -> None:
        """Until `tighten`: one process may work while the others wait."""
        self._set(self._long)

    def tighten(self) -> None:
        """From now on nobody has a reason to be late."""
        self._set(self._short)

    def _set(self, timeout: timedelta) -> None:
        if self._alone:
            return
        from torch.distributed import distributed_c10d as c10d

        for group in list(c10d._world.pg_map):  # hybrid sharding has some of its own
            c10d._set_pg_timeout(timeout, group)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error only says that another process is gone or cannot be reached."""
    words = f"{type(error).__name__}: {error}"
    if isinstance(error, ConnectionError):
        return True
    return isinstance(error, RuntimeError) and any(word in words for word in LOST)
