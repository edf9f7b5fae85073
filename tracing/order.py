"""The collectives of a micro-batch in the order of their calls, alike blocks as one row."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from tracing.spans import BACKWARD, BLOCK, FORWARD, UPDATES, Collective, Process, Span, enclosing


@dataclass(frozen=True)
class Meeting:
    """Successive collectives of one kind, in a place of the step."""

    part: str
    """The part of the step, one of `UPDATES`."""
    place: str
    """Such as "each of blocks 0 to 5"; empty if the part has none of a block."""
    kind: str
    calls: int
    size: int
    """Bytes of the full tensors of all calls; for alike blocks, of one block."""


def meetings(step: Process) -> list[Meeting]:
    """The collectives of a step's last micro-batch, and of what follows it.

    FSDP gathers a block ahead of time: its collectives are listed with those of that block.
    """
    found: list[Meeting] = []
    for part in UPDATES:
        starts = [span.start for span in step.parts if span.name == part]
        if not starts:
            continue
        begin = max(starts) if part in (FORWARD, BACKWARD) else min(starts)
        own = [one for one in step.collectives if one.part == part and one.called >= begin]
        found += _of_part(part, own, [one for one in step.blocks if one.start >= begin])
    return found


def _of_part(part: str, own: Sequence[Collective], blocks: Sequence[Span]) -> list[Meeting]:
    """`blocks` are their passes from the beginning of the part on."""
    by_block: dict[int, list[Meeting]] = {}
    before: list[Meeting] = []
    after: list[Meeting] = []
    numbers = [_block(one, blocks) for one in own]
    within = any(number is not None for number in numbers)
    first = min((block.start for block in blocks), default=inf)
    for one, number in zip(own, numbers, strict=True):
        if number is not None:
            _append(by_block.setdefault(number, []), Meeting(part, "", one.name, 1, one.size))
            continue
        early = not within or one.called < first
        place = f"{'before' if early else 'after'} the blocks" if within else ""
        _append(before if early else after, Meeting(part, place, one.name, 1, one.size))
    alike: list[list[int]] = []
    for number, rows in by_block.items():
        if alike and by_block[alike[-1][0]] == rows:
            alike[-1].append(number)
        else:
            alike.append([number])
    found = before
    for some in alike:
        place = f"each of blocks {some[0]} to {some[-1]}" if some[1:] else f"{BLOCK} {some[0]}"
        found += [replace(one, place=place) for one in by_block[some[0]]]
    return found + after


def _append(rows: list[Meeting], one: Meeting) -> None:
    """Add a call to the last row if it is of the same kind."""
    if rows and rows[-1].kind == one.kind:
        last = rows[-1]
        rows[-1] = replace(last, calls=last.calls + 1, size=last.size + one.size)
    else:
        rows.append(one)


def _block(one: Collective, blocks: Sequence[Span]) -> int | None:
    """The block that a collective is of; None if it is of none."""
    carried = re.search(r"\.(\d+)$", one.carries)
    if one.carries:
        return int(carried[1]) if carried else None
    around = enclosing(blocks, one.called)
    return None if around is None else int(around.name.removeprefix(f"{BLOCK} "))
