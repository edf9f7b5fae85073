"""What all processes must agree on before a run, without one failing while the others wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast

from training.exits import exit_code_for, is_lasting

Result = TypeVar("Result")


class FailedElsewhere(Exception):
    """Another process has the error and says it; this one only ends."""

    def __init__(self, code: int, for_good: bool) -> None:
        super().__init__()
        self.code = code
        """The other process's exit code, and so this one's."""
        self.for_good = for_good
        """Whether another start would only fail again."""


def local_main_first(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """`work()` on the main process of each machine, then on the others, which find its results.

    Every process must call this. When it fails on one, all end at once instead of waiting.
    """
    first = _together(accelerator, accelerator.is_local_main_process, work)
    others = _together(accelerator, not accelerator.is_local_main_process, work)
    result = first if accelerator.is_local_main_process else others
    assert result is not None
    return result


def run_on_main(accelerator: Accelerator, work: Callable[[], Result]) -> Result | None:
    """`work()` on the main process, None on the others, and an end for all when it fails.

    Every process must call this.
    """
    return _together(accelerator, accelerator.is_main_process, work)


def run_on_all(accelerator: Accelerator, work: Callable[[], Result]) -> Result:
    """`work()` on every process, and an end for all when it fails on one.

    Every process must call this.
    """
    return cast(Result, _together(accelerator, True, work))


def broadcast_text(accelerator: Accelerator, text: str | None) -> str:
    """The main process's text, on every process. Every process must call this.

    As bytes in tensors: what accelerate offers for objects pickles them.
    """
    content = (text or "").encode()
    length = torch.tensor([len(content)], device=accelerator.device)
    length = broadcast(length)
    told = torch.zeros(int(length), dtype=torch.uint8, device=accelerator.device)
    if accelerator.is_main_process:
        told = torch.tensor(list(content), dtype=torch.uint8, device=accelerator.device)
    return bytes(broadcast(told).tolist()).decode()


def equal_on_all(accelerator: Accelerator, digest: str) -> bool:
    """Whether all processes hold the same hexadecimal digest. Every process must call this."""
    number = torch.tensor([digest_number(digest)], device=accelerator.device)
    return bool((accelerator.gather(number) == number).all())


def digest_number(digest: str) -> int:
    """A hexadecimal digest, cut to what fits into an int64."""
    return int(digest[:15], 16)


def _together(accelerator: Accelerator, mine: bool, work: Callable[[], Result]) -> Result | None:
    result: Result | None = None
    problem: Exception | None = None
    if mine:
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
    told = accelerator.gather(torch.tensor([mine], device=accelerator.device)).tolist()
    failed = [process for process, (code, _) in enumerate(told) if code]
    if not failed:
        return
    if problem is not None and failed[0] == accelerator.process_index:
        problem.reported_here = True  # type: ignore[attr-defined]
        raise problem
    code, for_good = told[failed[0]]
    raise FailedElsewhere(code, bool(for_good))
