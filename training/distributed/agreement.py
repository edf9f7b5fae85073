"""Agreement between the processes of a run: when one fails, all end instead of waiting for it.

The file also says what an error means: whose mistake it is, its exit code, whether to try again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar, cast

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast

from config.schema import ConfigError
from data.errors import DataError, TextLost, TextUnreachable
from snapshot.errors import SnapshotError
from store.errors import StoreError, StoreUnreachable
from training.exits import EXIT_FAILED, EXIT_USER_MISTAKE, OutOfMemory, TrainingStopped

USER_MISTAKES = (ConfigError, DataError, SnapshotError, StoreError)
"""Errors that are shown as a sentence, without a traceback."""
TEMPORARY = (StoreUnreachable, TextUnreachable, TextLost, OutOfMemory)
"""Errors that are nobody's mistake. The same command may succeed later."""
Result = TypeVar("Result")


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

    Every process must call this. When it fails, all end.
    """
    text = json.dumps(run_on_main(accelerator, work))
    return cast(Result, json.loads(broadcast_text(accelerator, text)))


def broadcast_text(accelerator: Accelerator, text: str | None) -> str:
    """Return the main process's text on every process. Every process must call this.

    The text travels as bytes in tensors, because accelerate's functions for objects pickle them.
    """
    content = (text or "").encode()
    length = torch.tensor([len(content)], device=accelerator.device)
    length = broadcast(length)
    sent = torch.zeros(int(length), dtype=torch.uint8, device=accelerator.device)
    if accelerator.is_main_process:
        sent = torch.tensor(list(content), dtype=torch.uint8, device=accelerator.device)
    return bytes(broadcast(sent).tolist()).decode()


def equal_on_all(accelerator: Accelerator, digest: str) -> bool:
    """Whether all processes hold the same hexadecimal digest. Every process must call this."""
    bits = int(digest[:15], 16)  # 60, which fit into an int64
    number = torch.tensor([bits], device=accelerator.device)
    return bool((accelerator.gather(number) == number).all())


def is_on_any(accelerator: Accelerator, here: bool) -> bool:
    """Whether something holds on any process. Every process must call this."""
    return bool(accelerator.gather(torch.tensor([int(here)], device=accelerator.device)).any())


def _run_where(accelerator: Accelerator, here: bool, work: Callable[[], Result]) -> Result | None:
    result: Result | None = None
    problem: Exception | None = None
    if here:
        try:
            result = work()
        except Exception as error:
            problem = error
    raise_if_any_failed(accelerator, problem)
    return result


def raise_if_any_failed(accelerator: Accelerator, problem: Exception | None) -> None:
    """Raise the first process's problem there, and FailedElsewhere on all others.

    Every process must call this. The problem is marked `reported_here`: one process reports it.
    """
    mine = [0, 0] if problem is None else [exit_code_for(problem), int(is_lasting(problem))]
    all_codes = accelerator.gather(torch.tensor([mine], device=accelerator.device)).tolist()
    failed = [process for process, (code, _) in enumerate(all_codes) if code]
    if not failed:
        return
    if problem is not None and failed[0] == accelerator.process_index:
        problem.reported_here = True  # type: ignore[attr-defined]
        raise problem
    code, for_good = all_codes[failed[0]]
    raise FailedElsewhere(code, bool(for_good))
