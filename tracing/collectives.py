"""The collectives of a step in the profile of a process: calls, bytes and time.

The profiler records a collective twice: where it is called, with its tensors, and where it takes
place, on a thread of gloo or as a kernel of NCCL.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

Event = dict[str, Any]
"""An event of a Chrome trace; times in microseconds."""
CALLS = {
    "c10d::_allgather_base_": ("all-gather", 0, ("allgather",)),
    "c10d::allgather_": ("all-gather", 1, ("allgather",)),
    "c10d::allgather_into_tensor_coalesced_": ("all-gather", 0, ("allgather",)),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1, ("reducescatter", "allreduce")),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1, ("reducescatter", "allreduce")),
    "c10d::allreduce_": ("all-reduce", 0, ("allreduce",)),
    "c10d::alltoall_base_": ("all-to-all", 1, ("alltoall",)),
    "c10d::broadcast_": ("broadcast", 0, ("broadcast",)),
}
"""torch's operations: the kind, the argument with the full tensor, and names of the transfer.
gloo has no reduce-scatter: torch sends an all-reduce instead."""
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
    around = next(one for one in events if one["name"] == step)
    transfers = list(filter(is_transfer, events))
    rows: dict[str, Row] = {}
    for call in (one for one in events if one["name"] in CALLS):
        kind, argument, names = CALLS[call["name"]]
        transfer = first_of(transfers, call["ts"], names)
        if transfer is not None:
            transfers.remove(transfer)
        if not around["ts"] <= call["ts"] < end_of(around):
            continue
        place, given, row = transfer or call, call["args"], rows.setdefault(kind, Row())
        row.calls += 1
        dtype = given["Input type"][argument]
        if dtype == "TensorList":  # its elements' type stands with the transfer
            dtype = (place["args"].get("Input type") or [place["args"].get("dtype", "float")])[0]
        size = BYTES.get(dtype.lower().removeprefix("c10::"), 1)
        row.size += size * elements(given["Input Dims"][argument])
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


def is_transfer(event: Event) -> bool:
    """Whether an event is a collective's own time: on gloo's thread, or as a kernel of NCCL."""
    on_gpu = event.get("cat") == "kernel" and "nccl" in event["name"].lower()
    return on_gpu or event["name"].startswith("gloo:")


def first_of(transfers: Sequence[Event], called: float, names: Sequence[str]) -> Event | None:
    """The first transfer of one of these names that ends after a call."""
    for transfer in transfers:
        plain = transfer["name"].lower().replace("_", "")
        if end_of(transfer) > called and any(name in plain for name in names):
            return transfer
    return None


def end_of(event: Event) -> float:
    """When an event ends."""
    return float(event["ts"] + event["dur"])


def elements(dims: Any) -> int:
    """Elements of a tensor's shape, or of all shapes of a list of tensors."""
    if dims and isinstance(dims[0], list):
        return sum(map(elements, dims))
    return prod(dims)
