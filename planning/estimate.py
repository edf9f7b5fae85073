"""The memory estimate of a run, extrapolated from four small traces to any depth and micro-batch.

Every allocation of an update, an evaluation or a sample is constant, or proportional to the layers,
the sequences, or both. So the total after each event follows, for every model of a width, from
traces of two depths and two micro-batches. Of a large vocabulary, the loss has its logits in chunks
in memory, and micro-batches with one, two and more chunks are traced separately. The peak is the
largest total. The peak itself is not extrapolated, because it may occur at another event. The
memory to write a snapshot is computed from the sizes of its tensors.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from model.family import ModelConfig
from model.head import chunk_rows
from model.layout import FLOAT_BYTES
from planning.allocation_log import (
    BETWEEN_COPIES,
    CLIP,
    IN_MICRO_BATCHES,
    KINDS,
    NORMS,
    OF_CONTEXT,
    OF_TENSORS,
    OF_VOCABULARY,
    SUM,
    SUMMED,
    UPDATE,
    LiveBytes,
    Place,
)
from planning.fake_trace import Shape, traced_phases
from snapshot.disk.model import ADAPTERS, WHOLE, layout_for
from snapshot.disk.tensor_files import BLOCK_BYTES
from snapshot.disk.tensors import moment_counts, written_as

EDGE = 2
"""Number of layers at each end that may differ from the others, because FSDP prefetches."""
SHALLOW, DEEP = 2 * EDGE + 1, 2 * EDGE + 2
SIZES = (2, 3)
"""Sequences of the traced micro-batches; a single sequence sometimes uses other kernels."""
PHASES = ("update", "evaluation", "sampling")
"""The phases of a run that are traced."""
ENDS = (SUM, CLIP, UPDATE)
"""The places of a step after its last micro-batch."""
ByPlace = dict[Place, np.ndarray]
"""Live bytes (events, kinds) at the places that models of every depth have."""


class MemoryEstimate:
    """Live bytes and traffic as functions of the sequences in a micro-batch."""

    def __init__(self, config: ModelConfig, shape: Shape) -> None:
        self.config, self.shape = config, shape
        self._lines: dict[tuple[int, ...], Line] = {}

    def _at(self, micro_batch_size: int) -> Line:
        sizes, several_chunks = traced_sizes(self.config, self.shape, micro_batch_size)
        if sizes not in self._lines:
            self._lines[sizes] = _traced_line(self.config, self.shape, sizes, several_chunks)
        return self._lines[sizes]

    def totals(self, micro_batch_size: int, accumulating: bool) -> np.ndarray:
        """Live bytes (events, kinds)."""
        line = self._at(micro_batch_size)
        totals = line.base + micro_batch_size * line.per_sequence
        return totals if accumulating else totals[line.first]

    def peaks(
        self, micro_batch_size: int, accumulating: bool, elsewhere: tuple[str, ...] = ()
    ) -> dict[str, float]:
        """The largest total of each phase, in bytes, without the kinds stored elsewhere."""
        line, counted = self._at(micro_batch_size), [kind not in elsewhere for kind in KINDS]
        totals = self.totals(micro_batch_size, accumulating)[:, counted].sum(axis=1)
        phases = line.phases if accumulating else line.phases[line.first]
        return {phase: float(totals[phases == phase].max()) for phase in PHASES}

    def largest(self, kind: str, micro_batch_size: int, accumulating: bool) -> float:
        """The largest total of one kind, in bytes."""
        totals = self.totals(micro_batch_size, accumulating)
        return float(totals[:, KINDS.index(kind)].max())

    def traffic(self, micro_batch_size: int, accumulation: int) -> dict[str, float]:
        """Bytes of the full tensors that each kind of collective gathers or reduces in a step."""
        rest, last = (
            {kind: base + micro_batch_size * each for kind, (base, each) in some.items()}
            for some in self._at(micro_batch_size).messages
        )

        def times(kind: str) -> int:
            if self.shape.sync_each or not self.shape.is_fsdp or kind in IN_MICRO_BATCHES:
                return accumulation - 1
            return min(accumulation - 1, 1)  # the first gathers, the last reduces

        kinds = {**rest, **last}
        return {kind: times(kind) * rest.get(kind, 0) + last.get(kind, 0) for kind in kinds}

    def sent(self, micro_batch_size: int, accumulation: int) -> float:
        """Bytes that one process sends in a step, with the ring algorithms of NCCL and gloo."""
        traffic = self.traffic(micro_batch_size, accumulation)
        return sum(sent_share(kind, self.shape) * size for kind, size in traffic.items())


@dataclass(frozen=True)
class Line:
    """Events whose live bytes are a line over the sequences in a micro-batch."""

    base: np.ndarray
    """Live bytes (events, kinds) that are independent of the sequences."""
    per_sequence: np.ndarray
    first: np.ndarray
    """Whether an event also occurs without gradient accumulation (events,)."""
    phases: np.ndarray
    """The phase of each event, one of `PHASES` (events,)."""
    messages: tuple[dict[str, tuple[float, float]], dict[str, tuple[float, float]]]
    """Bytes of the full tensors of each kind of collective, in every micro-batch except the last,
    and in the last: those that are independent of the sequences, and those of a sequence."""


def traced_sizes(
    config: ModelConfig, shape: Shape, micro_batch_size: int
) -> tuple[tuple[int, ...], bool]:
    """The micro-batches to trace for an estimate at this one, and whether chunks are left out.

    The logits of the loss grow with the sequences as long as they are one chunk. Then a second one
    grows, which adds to the gradient that the first has made. From two full chunks on, the others
    need no more memory, and the last may be smaller. Each of these ranges has a line of its own.
    """
    rows = chunk_rows(-(-config.vocab_size // shape.tensor))
    length = config.block_size // shape.context
    most, full = rows // length, -(-2 * rows // length)
    is_whole = config.vocab_size <= config.n_embd and shape.tensor == 1
    if is_whole or (micro_batch_size <= most and most >= max(SIZES)):
        return SIZES, False
    if micro_batch_size >= full:
        return (max(full, SIZES[0]), max(full, SIZES[0]) + 1), True
    low, high = (1, most) if micro_batch_size <= most else (most + 1, full - 1)
    return tuple(range(low, min(low + 1, high) + 1)), False


def _traced_line(
    config: ModelConfig, shape: Shape, sizes: tuple[int, ...], several_chunks: bool
) -> Line:
    """The line through traces at one or two numbers of sequences.

    They are of small models of this width, whose totals are extrapolated to its depth.
    """
    layers = config.n_layer
    whole = layers <= DEEP or shape.freeze  # one layer may be frozen, and the next not
    depths = (layers, layers) if whole else (SHALLOW, DEEP)
    corners = {
        (depth, size): traced_phases(config.with_layers(depth), size, shape)
        for depth in set(depths)
        for size in sizes
    }
    edge = layers if whole else EDGE
    known = {corner: _at_common_places(trace, corner[0], edge) for corner, trace in corners.items()}
    sequences = [_extrapolate(known, depths, layers, size, several_chunks) for size in sizes]
    places = [place for place, totals in sequences[0].items() for _ in totals]
    low, *more = (np.concatenate(list(by_place.values())) for by_place in sequences)
    messages = []
    for micro in (0, 1):
        few, *many = (
            _messages([corners[depth, size] for depth in depths], micro, depths, layers)
            for size in sizes
        )
        each = {kind: many[0][kind] - few[kind] if many else 0.0 for kind in few}
        messages.append({kind: (few[kind] - sizes[0] * each[kind], each[kind]) for kind in few})
    phases = np.array([_phase(place) for place in places])
    first = np.array([place[1:2] != (1,) for place in places])  # all but the second micro-batch
    per_sequence = more[0] - low if more else 0 * low  # the sizes differ by one sequence
    base = low - sizes[0] * per_sequence
    return Line(base, per_sequence, first, phases, (messages[0], messages[1]))


def sent_share(kind: str, shape: Shape) -> float:
    """Bytes that one process sends per byte of a collective's full tensor, on a ring.

    To gather or to reduce, each of N processes passes on N - 1 of N parts; an all-reduce does both.
    In an all-to-all each sends N - 1 parts of its own.
    See Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    size = prod(_sizes(shape)[one] for one in _axes(kind))
    return (1 + kind.startswith("all-reduce")) * (size - 1) / size


def groups_of(kind: str, shape: Shape) -> list[list[int]]:
    """The groups of processes that take part in a kind of collective, by their ranks."""
    sizes, axes = _sizes(shape), _axes(kind)
    mesh = np.arange(prod(sizes)).reshape(sizes)
    inner = [one for one in range(len(sizes)) if one in axes]
    outer = [one for one in range(len(sizes)) if one not in axes]
    groups = mesh.transpose(*outer, *inner).reshape(-1, prod(sizes[one] for one in inner))
    return [[int(rank) for rank in ranks] for ranks in groups]


def _sizes(shape: Shape) -> tuple[int, int, int, int]:
    """Copies of the model, and in each: shards, processes of a sequence, processes of a matrix."""
    return shape.copies, shape.shards // shape.context, shape.context, shape.tensor


def _axes(kind: str) -> tuple[int, ...]:
    """The places in `_sizes` over which a kind of collective goes."""
    if kind in OF_CONTEXT.values():
        return (2,)
    if kind in (*OF_TENSORS.values(), OF_VOCABULARY, SUMMED, NORMS):
        return (3,)
    if kind in ("all-reduce", BETWEEN_COPIES):
        return (0,)
    if kind == "all-to-all":  # of an optimizer's update
        return 1, 2, 3
    return 1, 2


def _phase(place: Place) -> str:
    """The phase of a place, one of `PHASES`."""
    return place[1] if place[1:2] in (("evaluation",), ("sampling",)) else "update"


def _at_common_places(trace: LiveBytes, depth: int, edge: int) -> ByPlace:
    """The totals by place, for the `edge` layers at each end, numbered from the nearer end.

    Between the ends totals rise or fall monotonically from layer to layer, so none is the largest.
    """
    events: dict[Place, list[np.ndarray]] = defaultdict(list)
    totals = trace.log.totals()
    # Allocations only: a peak is always one. The order of deallocations between two of them varies,
    # for example for autocast's copies of the weights.
    for lifetime in trace.log.lifetimes:
        place, total = trace.log.places[lifetime.allocated_at], totals[lifetime.allocated_at]
        if place and place[0] in ("forward", "backward"):
            name, micro, layer = place
            if edge <= layer < depth - edge:
                continue
            place = (name, micro, layer if layer < edge else layer - depth)
        if place:
            events[place].append(total)
    return {place: np.stack(totals) for place, totals in events.items()}


def _extrapolate(
    known: dict[tuple[int, int], ByPlace],
    depths: tuple[int, int],
    layers: int,
    size: int,
    several_chunks: bool,
) -> ByPlace:
    """The totals at `layers` layers and `size` sequences, at the events that all traces share.

    With `several_chunks` of logits, the last may be a smaller one, which is not extrapolated.
    """
    found = {}
    for place in known[depths[0], size]:
        corners = [by_place[place] for by_place in known.values()]
        # If the number of events depends on the depth, the largest total represents all of them.
        same = len({len(totals) for totals in corners}) == 1 and not several_chunks
        low, high = (
            totals if same else totals[[totals.sum(axis=1).argmax()]]
            for totals in (known[depth, size][place] for depth in depths)
        )
        found[place] = _line(low, high, depths, layers)
    return found


def _line(low: Any, high: Any, depths: tuple[int, int], layers: int) -> Any:
    """The line through two points, at `layers`."""
    if depths[0] == depths[1]:
        return low
    return low + (layers - depths[0]) * (high - low) / (depths[1] - depths[0])


def _messages(
    traces: list[LiveBytes], micro: int, depths: tuple[int, int], layers: int
) -> dict[str, float]:
    """Bytes of the full tensors of each kind of collective in a micro-batch, at `layers` layers."""
    found: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for trace, counted in zip(traces, found, strict=True):
        for ((*_, at), kind), size in trace.traffic.items():
            if at == micro or (at in ENDS and micro == 1):
                counted[kind] += size
    low, high = found
    return {kind: _line(low[kind], high[kind], depths, layers) for kind in low}


@dataclass(frozen=True)
class WritingMemory:
    """The maximum bytes to write a snapshot, in addition to weights and optimizer."""

    on_device: int
    """On the device of each process. On a CPU, only the process that writes needs it."""
    on_host: int
    """CPU memory of each process that writes; 0 if the device is the CPU."""
    copies: int
    """More CPU memory for copies, if half of what is free suffices for all of them."""


def writing_memory(config: ModelConfig, shape: Shape, offload: bool) -> WritingMemory:
    """The peak of `snapshot.disk.save.begin_snapshot`, without a step at the same time.

    Under FSDP each process writes its own shards.
    """
    layout, parts = layout_for(config), shape.shards * shape.tensor
    layout.freeze(shape.freeze)
    prefix = WHOLE if config.lora is None else ADAPTERS
    held = layout.parameters() if config.lora is None else layout.adapters()
    moments = moment_counts(layout, shape.optimizer)
    total = sum(parameter.nbytes * (1 + moments.get(name, 0)) for name, parameter in held.items())
    largest = block = 0
    for name, parameter in held.items():
        largest = max(largest, parameter.nbytes // parts)
        if layout.is_transposed(name):
            row = parameter.nbytes // parameter.shape[1] // parts
            rows = min(parameter.shape[1], max(1, BLOCK_BYTES // row))
            block = max(block, rows * row)
    converted = 0  # tensors that are not stored as they are: their parameters are gathered first
    for group in written_as(layout, prefix):
        if group.convert is not None:
            converted = max(
                converted, FLOAT_BYTES * sum(prod(shape) for shape in group.shapes.values())
            )
    copies = total // parts
    if shape.device == "cpu":
        gathered = converted if shape.is_fsdp else 0
        return WritingMemory(max(block, gathered + converted), 0, copies)
    on_device = 2 * converted if shape.is_fsdp and not offload else 0
    return WritingMemory(on_device, max(largest + block, 2 * converted), copies)
