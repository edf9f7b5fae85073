"""How long a process waits for the others, and how it recognizes that one of them is gone.

accelerate has no interface for this, so the file uses torch.distributed itself.
"""

from __future__ import annotations

from datetime import timedelta

from accelerate import Accelerator

from config.schema import RunConfig

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
"""Texts in torch's errors that only report the end of another process."""


class ProcessGroupTimeouts:
    """The timeout of collectives: short within a step, long where one process works alone.

    A machine that is cut off sends nothing, so only the time distinguishes it from a slow one.
    Before the first step other processes may prepare a text, download a snapshot or compile. Around
    a snapshot they wait for the process that writes it.
    """

    def __init__(self, accelerator: Accelerator, run: RunConfig) -> None:
        """The timeout is long from now on."""
        self._accelerator, self._alone = accelerator, accelerator.num_processes == 1
        self._short = timedelta(seconds=run.collective_timeout_seconds)
        self._long = timedelta(
            seconds=max(run.start_timeout_seconds, run.collective_timeout_seconds)
        )
        self.relax()  # the groups of hybrid sharding were created with another timeout

    def relax(self) -> None:
        """Use the long timeout: one process may work while the others wait."""
        self._set(self._long)

    def wait_for_everyone(self, seconds: float) -> None:
        """Wait for all processes; one may work this long in addition to the long timeout.

        Every process must call this."""
        self._set(self._long + timedelta(seconds=seconds))
        self._accelerator.wait_for_everyone()

    def tighten(self) -> None:
        """Use the short timeout: no process has a reason to be late."""
        self._set(self._short)

    def _set(self, timeout: timedelta) -> None:
        if self._alone:
            return
        from torch.distributed import distributed_c10d as c10d

        for group in list(c10d._world.pg_map):  # hybrid sharding has groups of its own
            c10d._set_pg_timeout(timeout, group)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error only reports that another process is gone or cannot be reached."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, ConnectionError):
        return True
    return isinstance(error, RuntimeError) and any(word in text for word in LOST)
