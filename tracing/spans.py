"""Read the Chrome trace of a process: the parts of its steps, its blocks and its collectives.

The profiler records a collective where it is called and where it takes place: gloo's on a thread of
its own, NCCL's as a kernel. The two are matched by kind, size and order.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from tracing.ranges import BLOCK, PARTS, STEP, TORCH_UPDATE, UPDATE

Event = dict[str, Any]
NORM = "all-reduce of the norm"
"""The collective of the gradient norm, which DTensor computes from the shards."""
CALLS = {
    "c10d::_allgather_base_": ("all-gather", 0, ("allgather",)),
    "c10d::allgather_": ("all-gather", 1, ("allgather",)),
    "c10d::allgather_into_tensor_coalesced_": ("all-gather", 0, ("allgather",)),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1, ("reducescatter", "allreduce")),
    "c10d::allreduce_": ("all-reduce", 0, ("allreduce",)),
    "c10d::broadcast_": ("broadcast", 0, ("broadcast",)),
}
"""torch's operations: the kind, the argument with the full tensor, and names of the transfer.
gloo has no reduce-scatter: torch sends an all-reduce instead."""
DTENSOR, WAIT = "_c10d_functional::all_reduce", "_c10d_functional::wait_tensor"
BYTES = {
    **{"double": 8, "long int": 8, "long": 8, "float": 4, "int": 4, "c10::bfloat16": 2},
    **{"bfloat16": 2, "c10::half": 2, "half": 2, "unsigned char": 1, "byte": 1, "bool": 1},
}
"""Bytes of an element, by the profiler's name of its type in lower case."""
FLOATS = ("double", "float", "bfloat16", "half")
ACCUMULATE = "torch::autograd::AccumulateGrad"
"""The operation that ends a backward pass; it has no number."""
COMPUTES = ("aten::", "torch::", "Torch-Compiled Region")
"""Prefixes of operations that compute."""


@dataclass(frozen=True)
class Span:
    """A named interval of time, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Collective(Span):
    """A collective where it took place; its name is its kind."""

    called: float
    """When the process called it."""
    size: int
    """Bytes of the full tensor."""
    is_float: bool
    """Whether it carries weights, gradients and the like."""
    part: str
    """The part of the step that called it, one of `PARTS`; empty between them."""
    carries: str
    """FSDP's name for its content, such as a block; otherwise empty."""
    overlapped: float
    """The share of its time in which the process also computed."""


@dataclass
class Process:
    """The trace of a process, or a part of it."""

    rank: int
    steps: list[Span] = field(default_factory=list)
    parts: list[Span] = field(default_factory=list)
    """The parts of steps, named as in `PARTS`."""
    blocks: list[Span] = field(default_factory=list)
    """The forward and the backward pass of each block, and its recomputation."""
    collectives: list[Collective] = field(default_factory=list)

    def within(self, span: Span) -> Process:
        """The collectives called within a span."""
        chosen = Process(self.rank)
        for name in ("steps", "parts", "blocks", "collectives"):
            for one in getattr(self, name):
                begun = one.called if isinstance(one, Collective) else one.start
                if span.start <= begun < span.end:
                    getattr(chosen, name).append(one)
        return chosen


def read_process(chrome: dict[str, Any], rank: int) -> Process:
    """Read the Chrome trace of a process."""
    events = [one for one in chrome["traceEvents"] if one.get("ph") == "X"]
    events.sort(key=lambda one: one["ts"])
    is_step = re.compile(rf"{STEP} \d+").fullmatch
    main = next(one["tid"] for one in events if is_step(one["name"]))
    process = Process(rank)
    for event in events:
        name = UPDATE if event["name"].startswith(TORCH_UPDATE) else event["name"]
        if event["tid"] == main and name in PARTS:
            process.parts.append(span_of(event, name))
        elif event["tid"] == main and is_step(name):
            process.steps.append(span_of(event, name))
    process.blocks = blocks_of(events, main)
    process.collectives = collectives_of(events, process.parts)
    return process


def span_of(event: Event, name: str) -> Span:
    """The span of an event of a Chrome trace."""
    return Span(name, event["ts"], event["ts"] + event["dur"])


def blocks_of(events: Sequence[Event], main: int) -> list[Span]:
    """The passes of each block: forward by its hooks, backward by autograd's numbers.

    A backward operation has the number of the forward operation that made it: the last one with
    that number on the main thread.
    """
    forward = [
        span_of(one, one["name"])
        for one in events
        if one["name"].startswith(f"{BLOCK} ") and one["tid"] == main
    ]
    starts = [one.start for one in forward]
    made_in: dict[int, str] = {}
    backward: list[Span] = []
    for event in events:
        number = event.get("args", {}).get("Sequence number")
        if event["name"].startswith("autograd::engine::evaluate_function"):
            span = span_of(event, made_in.get(number, ""))
            if backward and (backward[-1].name == span.name or ACCUMULATE in event["name"]):
                backward[-1] = replace(backward[-1], end=span.end)
            else:
                backward.append(span)
        elif number is not None and event["tid"] == main:
            before = bisect_right(starts, event["ts"]) - 1
            inside = before >= 0 and event["ts"] < forward[before].end
            made_in[number] = forward[before].name if inside else ""
    return sorted(forward + [one for one in backward if one.name], key=lambda one: one.start)


def collectives_of(events: Sequence[Event], parts: Sequence[Span]) -> list[Collective]:
    """The collectives of a process, in the order of their calls."""
    places = [one for one in events if _takes_place(one)]
    by_dtensor = [span_of(one, "") for one in events if one["name"] == DTENSOR]
    by_fsdp = [span_of(one, one["name"]) for one in events if one["name"].startswith("FSDP::")]
    busy = computing(events)
    found = []
    for call in (one for one in events if one["name"] in CALLS):
        kind, argument, names = CALLS[call["name"]]
        dims, types = (call["args"][key] for key in ("Input Dims", "Input type"))
        count, typed = _elements(dims[argument]), types[argument]
        place = _first_match(places, call["ts"], names, count)
        if place is not None:
            places.remove(place)
            given = place["args"].get("Input type") or [place["args"].get("dtype", "")]
            typed = given[0] if typed == "TensorList" else typed
        part, carried = enclosing(parts, call["ts"]), enclosing(by_fsdp, call["ts"])
        span = span_of(place or call, "")
        found.append(
            Collective(
                NORM if kind == "all-reduce" and enclosing(by_dtensor, call["ts"]) else kind,
                span.start,
                span.end,
                called=call["ts"],
                size=count * BYTES[typed.lower()],
                is_float=typed.lower().removeprefix("c10::") in FLOATS,
                part=part.name if part else "",
                carries=_block_in(carried.name) if carried else "",
                overlapped=share_of(span, busy),
            )
        )
    return found


def _takes_place(event: Event) -> bool:
    """Whether an event is a collective's own time: on gloo's thread, or as a kernel of NCCL."""
    on_gpu = event.get("cat") == "kernel" and "nccl" in event["name"].lower()
    return on_gpu or event["name"].startswith("gloo:")


def _first_match(
    places: Sequence[Event], called: float, names: Sequence[str], count: int
) -> Event | None:
    """The first collective of a kind and a size that ends after its call."""
    for place in places:
        plain, args = place["name"].lower().replace("_", ""), place["args"]
        sizes = [_elements(one) for one in args.get("Input Dims", [])]
        sizes += [args[key] for key in ("In msg nelems", "Out msg nelems") if key in args]
        ended = place["ts"] + place["dur"] < called
        fits = not sizes or count in sizes or plain.endswith("allgather")  # one's part alone
        if not ended and fits and any(name in plain for name in names):
            return place
    return None


def computing(events: Sequence[Event]) -> list[Span]:
    """When a process computes, in order and without overlaps: on its GPU, otherwise on its CPU."""
    kernels = [one for one in events if one.get("cat") == "kernel" and not _takes_place(one)]
    calls = [one["ts"] for one in events if one["name"] in CALLS or one["name"] == WAIT]
    merged: list[Span] = []
    for event in kernels or [one for one in events if one["name"].startswith(COMPUTES)]:
        span = span_of(event, "")
        if bisect_left(calls, span.start) < bisect_left(calls, span.end) and not kernels:
            continue  # an operation on shards, which waits for its collective
        if merged and span.start <= merged[-1].end:
            merged[-1] = replace(merged[-1], end=max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return merged


def share_of(span: Span, others: Sequence[Span]) -> float:
    """The share of a span that others, in order and without overlaps, cover."""
    covered = 0.0
    for one in others[bisect_right(others, span.start, key=lambda one: one.end) :]:
        if one.start >= span.end:
            break
        covered += min(span.end, one.end) - max(span.start, one.start)
    return covered / (span.end - span.start) if span.end > span.start else 0.0


Some = TypeVar("Some", bound=Span)


def enclosing(spans: Iterable[Some], time: float) -> Some | None:
    """The innermost span around a time: the last to begin."""
    around = [one for one in spans if one.start <= time < one.end]
    return max(around, key=lambda one: one.start, default=None)


def _block_in(name: str) -> str:
    """FSDP's name in brackets. Its root group has no name and holds what is in no block."""
    inside = re.search(r"\((.+)\)", name)
    return inside[1].replace("transformer.", "") if inside else "outside the blocks"


def _elements(dims: Any) -> int:
    """Elements of a tensor's shape, or of all shapes of a list of tensors."""
    if dims and isinstance(dims[0], list):
        return sum(map(_elements, dims))
    product = 1
    for one in dims:
        product *= one
    return product
