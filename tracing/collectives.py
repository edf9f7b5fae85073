"""The collectives of a step in the profile of a process: calls and bytes by kind."""

from __future__ import annotations

from collections.abc import Iterable
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


def collectives_of(events: Iterable[Event], step: str) -> dict[str, tuple[int, int]]:
    """By kind, the calls during the range with this name, and the bytes of their full tensors."""
    events = sorted((one for one in events if one.get("ph") == "X"), key=lambda one: one["ts"])
    begin, end = next((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == step)
    found: dict[str, tuple[int, int]] = {}
    # The profiler names no type for the tensors of a list: those of DTensor have that of the
    # functional operation that calls c10d's, all others are float32.
    functional = {"end": 0.0, "dtype": "float"}
    for call in events:
        name, given = call["name"], call.get("args", {})
        if name.startswith("_c10d_functional::"):
            functional = {"end": call["ts"] + call["dur"], "dtype": given["Input type"][0]}
        if name not in CALLS or not begin <= call["ts"] < end:
            continue
        kind, argument = CALLS[name]
        dtype = given["Input type"][argument]
        if dtype == "TensorList":
            dtype = functional["dtype"] if call["ts"] < functional["end"] else "float"
        size = BYTES.get(dtype.lower().removeprefix("c10::"), 1)
        calls, total = found.get(kind, (0, 0))
        found[kind] = calls + 1, total + size * _elements(given["Input Dims"][argument])
    return found


def _elements(dims: Any) -> int:
    """Elements of a tensor's shape, or of all shapes of a list of tensors."""
    return sum(map(_elements, dims)) if dims and isinstance(dims[0], list) else prod(dims)
