"""The collectives of a step in the profile of a process: calls, bytes and time.

The profiler records a collective twice: where it is called, with its tensors, and where it takes
place, on a thread of gloo or as a kernel of NCCL.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

Event = dict[str, Any]
"""An event of a Chrome trace; times in microseconds."""
CALLS = {
    "c10d::_allgather_base_": ("all-gather", 0),
    "c10d::allgather_": ("all-gather", 1),
    "c10d::allgather_into_tensor_coalesced_": ("all-gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "c10d::allreduce_": ("all-reduce", 0),
    "c10d::alltoall_base_": ("all-to-all", 1),
    "c10d::broadcast_": ("broadcast", 0),
}
"""torch's operations: the kind, and the argument with the full tensor."""
BYTES = {"double": 8, "long": 8, "long int": 8, "float": 4, "int": 4, "bfloat16": 2, "half": 2}
"""Bytes of an element, by the profiler's name of its type; 1 for all others."""


@dataclass
class Row:
    """The collectives of one kind in a step of one process."""

    calls: int = 0
    size: int = 0
    """Bytes of the full tensors."""
    microseconds: float = 0.0


def rows_of(events: Iterable[Event], step: str) -> dict[str, Row]:
    """The collectives that are called during the range with a name, by their kind."""
    events = sorted((one for one in events if one.get("ph") == "X"), key=lambda one: one["ts"])
    begin, end = next((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == step)
    transfers = list(filter(_is_transfer, events))
    rows: dict[str, Row] = {}
    for call in (one for one in events if one["name"] in CALLS):
        kind, argument = CALLS[call["name"]]
        # gloo has no reduce-scatter: torch sends an all-reduce instead.
        names = {kind.replace("-", ""), *(["allreduce"] if kind == "reduce-scatter" else [])}
        transfer = next((one for one in transfers if _is_of(one, call, names)), None)
        if transfer is not None:
            transfers.remove(transfer)
        if not begin <= call["ts"] < end:
            continue
        place, given, row = transfer or call, call["args"], rows.setdefault(kind, Row())
        row.calls += 1
        dtype = given["Input type"][argument]
        if dtype == "TensorList":  # its elements' type stands with the transfer
            dtype = (place["args"].get("Input type") or [place["args"].get("dtype", "float")])[0]
        size = BYTES.get(dtype.lower().removeprefix("c10::"), 1)
        row.size += size * _elements(given["Input Dims"][argument])
        row.microseconds += place["dur"]
    return rows


def table(rows: dict[str, Row]) -> list[str]:
    """The rows for a terminal, below a head; no lines without collectives."""
    if not rows:
        return []
    lines = [f"{'collective':<16}{'calls':>7}{'bytes':>17}{'ms':>10}"]
    lines += [
        f"{kind:<16}{row.calls:>7,}{row.size:>17,}{row.microseconds / 1e3:>10.2f}"
        for kind, row in rows.items()
    ]
    return lines


def _is_transfer(event: Event) -> bool:
    """Whether an event is a collective's own time: on gloo's thread, or as a kernel of NCCL."""
    on_gpu = event.get("cat") == "kernel" and "nccl" in event["name"].lower()
    return on_gpu or event["name"].startswith("gloo:")


def _is_of(transfer: Event, call: Event, names: Iterable[str]) -> bool:
    """Whether a transfer has one of these names, and ends after a call."""
    plain = transfer["name"].lower().replace("_", "")
    ends = transfer["ts"] + transfer["dur"]
    return bool(ends > call["ts"]) and any(name in plain for name in names)


def _elements(dims: Any) -> int:
    """Elements of a tensor's shape, or of all shapes of a list of tensors."""
    return sum(map(_elements, dims)) if dims and isinstance(dims[0], list) else prod(dims)
