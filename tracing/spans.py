"""Read the Chrome trace of a process: the parts of its steps, its blocks and its collectives.

The profiler records a collective where it is called and where it takes place: gloo's on a thread of
its own, NCCL's as a kernel. The two are matched by kind, size and order.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeVar

from planning.allocation_log import CLIP, FUNCTIONAL, SUM, UPDATE, kind_at, shared_kind

STEP, PREPARE, FORWARD, BACKWARD = "step", "prepare", "forward", "backward"
AGREEMENT, BLOCK = "agreement", "block"
TORCH_UPDATE = "Optimizer.step#"
"""Prefix of torch's own range of an update."""
UPDATES = (FORWARD, BACKWARD, CLIP, UPDATE)
PARTS = (PREPARE, *UPDATES, AGREEMENT)
"""The parts of a step; the first comes before all steps."""
Event = dict[str, Any]
NORM = "all-reduce of the norm"
"""The collective of the gradient norm, which DTensor computes from the shards."""
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
RETURNING = re.compile(rf"{FUNCTIONAL}::(all_\w+|reduce_\w+)").fullmatch
"""torch's collectives that return their result: of shared sequences and matrices, of DTensor."""
WAIT = f"{FUNCTIONAL}::wait_tensor"
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
            for inner in getattr(self, name):
                begun = inner.called if isinstance(inner, Collective) else inner.start
                if span.start <= begun < span.end:
                    getattr(chosen, name).append(inner)
        return chosen


def read_process(chrome: dict[str, Any], rank: int) -> Process:
    """What the Chrome trace of a process says."""
    events = [event for event in chrome["traceEvents"] if event.get("ph") == "X"]
    events.sort(key=lambda event: event["ts"])
    is_step = re.compile(rf"{STEP} \d+").fullmatch
    main = next(event["tid"] for event in events if is_step(event["name"]))
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
    """The passes of each block: forward from its hooks, backward from autograd's sequence numbers.

    A backward operation has the number of the forward operation that made it: the last one with
    that number on the main thread.
    """
    forward = [
        span_of(event, event["name"])
        for event in events
        if event["name"].startswith(f"{BLOCK} ") and event["tid"] == main
    ]
    starts = [span.start for span in forward]
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
    return sorted(forward + [span for span in backward if span.name], key=lambda span: span.start)


def collectives_of(events: Sequence[Event], parts: Sequence[Span]) -> list[Collective]:
    """The collectives of a process, in the order of their calls."""
    places = [event for event in events if _takes_place(event)]
    returning = [
        span_of(event, shared_kind(operation[1], len(event["args"]["Input Dims"][0])) or "")
        for event in events
        if (operation := RETURNING(event["name"]))
    ]
    sums = [span_of(event, "") for event in events if event["name"] == SUM]
    by_fsdp = [
        span_of(event, event["name"]) for event in events if event["name"].startswith("FSDP::")
    ]
    busy = computing(events)
    found = []
    for call in (event for event in events if event["name"] in CALLS):
        kind, argument, names = CALLS[call["name"]]
        dims, types = (call["args"][key] for key in ("Input Dims", "Input type"))
        count, typed = _elements(dims[argument]), types[argument]
        place = _first_match(places, call["ts"], names, count)
        if place is not None:
            places.remove(place)
            given = place["args"].get("Input type") or [place["args"].get("dtype", "")]
            typed = given[0] if typed == "TensorList" else typed
        around, carried = enclosing(parts, call["ts"]), enclosing(by_fsdp, call["ts"])
        part = around.name if around else ""
        shared = enclosing(returning, call["ts"])
        if shared is not None and part not in (CLIP, UPDATE):
            kind = shared.name or kind
        elif shared is not None and kind == "all-reduce":
            kind = NORM
        else:
            kind = kind_at(kind, SUM if enclosing(sums, call["ts"]) else part)
        span = span_of(place or call, "")
        found.append(
            Collective(
                kind,
                span.start,
                span.end,
                called=call["ts"],
                size=count * BYTES[typed.lower()],
                is_float=typed.lower().removeprefix("c10::") in FLOATS,
                part=part,
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
        sizes = [_elements(shape) for shape in args.get("Input Dims", [])]
        sizes += [args[key] for key in ("In msg nelems", "Out msg nelems") if key in args]
        ended = place["ts"] + place["dur"] < called
        fits = not sizes or count in sizes or plain.endswith("allgather")  # one's part alone
        if not ended and fits and any(name in plain for name in names):
            return place
    return None


def computing(events: Sequence[Event]) -> list[Span]:
    """When a process computes, in order and without overlaps: on its GPU, otherwise on its CPU."""
    kernels = [
        event for event in events if event.get("cat") == "kernel" and not _takes_place(event)
    ]
    calls = [event["ts"] for event in events if event["name"] in CALLS or event["name"] == WAIT]
    merged: list[Span] = []
    for event in kernels or [event for event in events if event["name"].startswith(COMPUTES)]:
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
    for other in others[bisect_right(others, span.start, key=lambda other: other.end) :]:
        if other.start >= span.end:
            break
        covered += min(span.end, other.end) - max(span.start, other.start)
    return covered / (span.end - span.start) if span.end > span.start else 0.0


Some = TypeVar("Some", bound=Span)


def enclosing(spans: Iterable[Some], time: float) -> Some | None:
    """The innermost span around a time: the last to begin."""
    around = [span for span in spans if span.start <= time < span.end]
    return max(around, key=lambda span: span.start, default=None)


def _block_in(name: str) -> str:
    """FSDP's name in brackets. Its root group has no name and holds what is in no block."""
    inside = re.search(r"\((.+)\)", name)
    return inside[1].replace("transformer.", "") if inside else "outside the blocks"


def _elements(dims: Any) -> int:
    """Elements of a tensor's shape, or of all shapes of a list of tensors."""
    if dims and isinstance(dims[0], list):
        return sum(map(_elements, dims))
    return prod(dims)
