"""The processes of a run: how they start, find each other, agree, wait, and notice a lost one.

accelerate silently ignores some requests of its config file and has no interface for the rest, so
this file uses torch.distributed itself.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, broadcast

from common.command import say_error
from config.schema import ConfigError, RunConfig
from data.errors import DataError, TextLost, TextUnreachable
from model.frozen import FrozenError
from model.lora import LoraError
from snapshot.errors import SnapshotError
from store.errors import StoreError, StoreUnreachable
from training.distributed.launch_file import refusals
from training.distributed.launcher import fsdp_requested, launcher, on_cpu, started_processes
from training.exits import EXIT_FAILED, EXIT_USER_MISTAKE, OutOfMemory, TrainingStopped

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

ARRIVAL_SECONDS = 0.02
"""How often the main process looks for the others at the start."""
OF_THREADS = "threads"
"""The description of the group of threads. One may write for longer than a step's timeout."""
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
USER_MISTAKES = (ConfigError, DataError, SnapshotError, StoreError, FrozenError, LoraError)
"""Errors that are shown as a sentence, without a traceback."""
TEMPORARY = (StoreUnreachable, TextUnreachable, TextLost, OutOfMemory)
"""Errors that are nobody's mistake. The same command may succeed later."""
Result = TypeVar("Result")


def init_processes(timeout: timedelta) -> None:
    """Refuse what cannot be honoured, and connect the processes, also for FSDP on CPUs.

    Call this before the Accelerator is created. `timeout` limits the wait for the other processes.
    Raises ConfigError that names the entry of the accelerate config file.
    """
    is_alone = launcher() is None  # as far as this process can see
    if refused := refusals():
        error = ConfigError("\n".join(refused))
        error.reported_here = is_alone  # type: ignore[attr-defined]
        raise error
    if (processes := started_processes()) == 1:
        return
    if is_alone:  # a shell may have exported what a launcher set
        say_error(
            f"waiting for all {processes} processes, which WORLD_SIZE and RANK name. If nobody has "
            "started the others, stop this one and unset WORLD_SIZE, RANK and LOCAL_RANK."
        )
    store, rank, processes = fresh_store(timeout)
    # The launcher does not pass use_cpu to several processes.
    state = PartialState(
        cpu=on_cpu(), store=store, rank=rank, world_size=processes, timeout=timeout
    )
    # Processes that do not see each other would each train alone, and write the same run.
    assert state.num_processes == processes, "accelerate has not connected the processes"
    if fsdp_requested() and on_cpu():
        # accelerate promotes only MULTI_GPU to FSDP and calls processes on CPUs MULTI_CPU. What
        # follows is torch's FSDP2 over gloo.
        state.distributed_type = DistributedType.MULTI_GPU


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
        """Use the long timeout until the step ends: one process may work while the others wait."""
        self.are_long = True
        self._set(self._long)

    def wait_for_everyone(self, seconds: float) -> None:
        """Wait for all processes; one may work this long in addition to the long timeout.

        Every process must call this."""
        self._set(self._long + timedelta(seconds=seconds))
        self._accelerator.wait_for_everyone()

    def tighten(self) -> None:
        """Use the short timeout: no process has a reason to be late."""
        if self.are_long:
            self.are_long = False
            self._set(self._short)

    def _set(self, timeout: timedelta) -> None:
        if self._alone:
            return
        from torch.distributed import distributed_c10d as c10d

        for group in list(c10d._world.pg_map):  # hybrid sharding has groups of its own
            if group.group_desc != OF_THREADS:
                c10d._set_pg_timeout(timeout, group)


def group_of_threads(seconds: float) -> ProcessGroup:
    """A group for threads that write snapshots; its timeout stays. Every process must call this.

    Nothing else may use it: its collectives would mix with theirs.
    """
    from torch.distributed import new_group

    return new_group(backend="gloo", timeout=timedelta(seconds=seconds), group_desc=OF_THREADS)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error only reports that another process is gone or cannot be reached."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, ConnectionError):
        return True
    return isinstance(error, RuntimeError) and any(word in text for word in LOST)


def exit_code_for(error: Exception) -> int:
    """The exit code of a run that ends with an error."""
    mistake = isinstance(error, USER_MISTAKES) and not isinstance(error, TEMPORARY)
    return EXIT_USER_MISTAKE if mistake else EXIT_FAILED


def is_lasting(error: Exception) -> bool:
    """Whether the same command would end with the same error, so that a restart is useless."""
    return isinstance(error, (*USER_MISTAKES, TrainingStopped)) and not isinstance(error, TEMPORARY)


class FailedElsewhere(Exception):
    """Another process has the error and reports it; this one only ends."""

    def __init__(self, code: int, for_good: bool) -> None:
        super().__init__()
        self.code = code
        """The other process's exit code, which this one returns as well."""
        self.for_good = for_good
        """Whether a restart would fail again."""


def local_main_first(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """Run `work()` on the first process of each machine, then on the others, which use its results.

    Every process must call this. When it fails on one process, all end.
    """
    first = _run_where(accelerator, accelerator.is_local_main_process, work)
    others = _run_where(accelerator, not accelerator.is_local_main_process, work)
    result = first if accelerator.is_local_main_process else others
    assert result is not None
    return result


def run_on_main(accelerator: Accelerator, work: Callable[[], Result]) -> Result | None:
    """Run `work()` on the main process; None on the others. When it fails, all end.

    Every process must call this.
    """
    return _run_where(accelerator, accelerator.is_main_process, work)


def run_on_all(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """Run `work()` on every process. When it fails on one process, all end.

    Every process must call this.
    """
    return cast(Result, _run_where(accelerator, True, work))


def decided_by_main(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """Run `work()` on the main process; its result, which JSON can hold, is that of all.

    Every process must call this. When it fails, all end. The result travels as bytes in a tensor,
    because accelerate's functions for objects pickle them.
    """
    content, problem = _tried(accelerator.is_main_process, lambda: json.dumps(work()).encode())
    length = raise_if_any_failed(accelerator, problem, len(content or b""))
    values = list(content or bytes(length))
    sent = torch.tensor(values, dtype=torch.uint8, device=accelerator.device)
    return cast(Result, json.loads(bytes(broadcast(sent).tolist())))


def equal_on_all(accelerator: Accelerator, text: str) -> bool:
    """Whether all processes have the same text. Every process must call this."""
    digest = hashlib.sha256(text.encode()).digest()[:7]  # which fits into an int64
    number = torch.tensor([int.from_bytes(digest)], device=accelerator.device)
    return bool((accelerator.gather(number) == number).all())


def is_on_any(accelerator: Accelerator, here: bool) -> bool:
    """Whether something holds on any process. Every process must call this."""
    return bool(accelerator.gather(torch.tensor([int(here)], device=accelerator.device)).any())


def _run_where(accelerator: Accelerator, here: bool, work: Callable[[], Result]) -> Result | None:
    result, problem = _tried(here, work)
    raise_if_any_failed(accelerator, problem)
    return result


def _tried(here: bool, work: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """The result of `work()` or its error; neither unless it is to run `here`."""
    if not here:
        return None, None
    try:
        return work(), None
    except Exception as error:
        return None, error


def raise_if_any_failed(
    accelerator: Accelerator, problem: Exception | None, number: int = 0
) -> int:
    """Raise the first process's problem there, and FailedElsewhere on all others.

    Every process must call this. The problem is marked `reported_here`: one process reports it.
    Returns the main process's `number`.
    """
    outcome = [0, 0] if problem is None else [exit_code_for(problem), int(is_lasting(problem))]
    mine = torch.tensor([[*outcome, number]], device=accelerator.device)
    of_all: list[list[int]] = accelerator.gather(mine).tolist()
    for process, (code, lasts, _) in enumerate(of_all):
        if code and problem is not None and process == accelerator.process_index:
            problem.reported_here = True  # type: ignore[attr-defined]
            raise problem
        if code:
            raise FailedElsewhere(code, bool(lasts))
    return of_all[0][2]
