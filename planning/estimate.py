"""The memory estimate of a run, extrapolated from four small traces to any depth and micro-batch.

Every allocation of an update, an evaluation or a sample is constant, or proportional to the layers,
the sequences, or both. So the total after each event follows, for every model of a width, from
traces of two depths and two micro-batches. The peak is the largest total. The peak itself is not
extrapolated, because it may occur at another event. The memory to write a snapshot is computed from
the sizes of its tensors.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from model.family import ModelConfig
from model.head import chunk_rows
from model.layout import FLOAT_BYTES
from planning.allocation_log import KINDS, LiveBytes, Place
from planning.fake_trace import Shape, traced_phases
from snapshot.disk.model import ADAPTERS, WHOLE, layout_for
from snapshot.disk.shards import moment_counts, written_as
from snapshot.disk.tensor_files import BLOCK_BYTES

EDGE = 2
"""Number of layers at each end that may differ from the others, because FSDP prefetches."""
SHALLOW, DEEP = 2 * EDGE + 1, 2 * EDGE + 2
SIZES = (2, 3)
"""Sequences of the traced micro-batches; a single sequence sometimes uses other kernels."""
MOST_TRACED = 512
"""Sequences beyond which chunks of logits are not looked at: such an estimate is too high."""
PHASES = ("update", "evaluation", "sampling")
"""The phases of a run that are traced."""
ByPlace = dict[Place, np.ndarray]
"""Live bytes (events, kinds) at the places that models of every depth have."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Live bytes and traffic as functions of the sequences in a micro-batch."""

    shape: Shape
    above: tuple[int, MemoryEstimate] | None
    """From how many sequences on the loss has several chunks of logits, and the estimate then."""
    base: np.ndarray
    """Live bytes (events, kinds) that are independent of the sequences."""
    per_sequence: np.ndarray
    first: np.ndarray
    """Whether an event also occurs without gradient accumulation (events,)."""
    phases: np.ndarray
    """The phase of each event, one of `PHASES` (events,)."""
    messages: tuple[dict[str, float], dict[str, float]]
    """Bytes of the full tensors of each kind of collective, in every micro-batch except the last,
    and in the last."""

    def totals(self, micro_batch_size: int, accumulating: bool) -> np.ndarray:
        """Live bytes (events, kinds)."""
        if self.above is not None and micro_batch_size >= self.above[0]:
            return self.above[1].totals(micro_batch_size, accumulating)
        totals = self.base + micro_batch_size * self.per_sequence
        return totals if accumulating else totals[self.first]

    def peaks(
        self, micro_batch_size: int, accumulating: bool, elsewhere: tuple[str, ...] = ()
    ) -> dict[str, float]:
        """The largest total of each phase, in bytes, without the kinds stored elsewhere."""
        if self.above is not None and micro_batch_size >= self.above[0]:
            return self.above[1].peaks(micro_batch_size, accumulating, elsewhere)
        counted = [kind not in elsewhere for kind in KINDS]
        totals = self.totals(micro_batch_size, accumulating)[:, counted].sum(axis=1)
        phases = self.phases if accumulating else self.phases[self.first]
        return {phase: float(totals[phases == phase].max()) for phase in PHASES}

    def largest(self, kind: str, micro_batch_size: int, accumulating: bool) -> float:
        """The largest total of one kind, in bytes."""
        totals = self.totals(micro_batch_size, accumulating)
        return float(totals[:, KINDS.index(kind)].max())

    def traffic(self, accumulation: int) -> dict[str, float]:
        """Bytes of the full tensors that each kind of collective gathers or reduces in a step."""
        rest, last = self.messages
        times = accumulation - 1
        if not self.shape.sync_each and self.shape.shards > 1:
            times = min(times, 1)  # the first gathers, the last reduces
        return {kind: times * rest.get(kind, 0) + last.get(kind, 0) for kind in {**rest, **last}}

    def sent(self, accumulation: int) -> float:
        """Bytes that one process sends in a step, with the ring algorithms of NCCL and gloo."""
        traffic = self.traffic(accumulation)
        return sum(sent_share(kind, self.shape) * size for kind, size in traffic.items())


def estimate_memory(config: ModelConfig, shape: Shape) -> MemoryEstimate:
    """Trace small models of this width, and extrapolate to its depth.

    Where the loss computes its logits in several chunks, their memory does not grow any more: from
    the second full one on, which adds to a gradient that the first has made.
    """
    several = -(-2 * chunk_rows(config.vocab_size) // config.block_size)
    above = None
    if SIZES[0] < several <= MOST_TRACED and config.vocab_size > config.n_embd:
        above = several, _estimate(config, shape, (several, several + 1))
    return replace(_estimate(config, shape, SIZES), above=above)


def _estimate(config: ModelConfig, shape: Shape, sizes: tuple[int, int]) -> MemoryEstimate:
    """The lines through traces at these numbers of sequences."""
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
    sequences = [_extrapolate(known, depths, layers, size, sizes != SIZES) for size in sizes]
    places = [place for place, totals in sequences[0].items() for _ in totals]
    low, high = (np.concatenate(list(by_place.values())) for by_place in sequences)
    messages = []
    for micro in (0, 1):
        less, more = (_messages(corners[depth, sizes[0]], micro) for depth in depths)
        messages.append({kind: _line(less[kind], more[kind], depths, layers) for kind in less})
    phases = np.array([_phase(place) for place in places])
    first = np.array([place[1:2] != (1,) for place in places])  # all but the second micro-batch
    base = sizes[1] * low - sizes[0] * high  # the sizes differ by one sequence
    return MemoryEstimate(shape, None, base, high - low, first, phases, (messages[0], messages[1]))


def sent_share(kind: str, shape: Shape) -> float:
    """Bytes that one process sends per byte of a collective's full tensor, on a ring.

    To gather or to reduce, each of N processes passes on N - 1 of N parts; an all-reduce does both.
    See Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    replicas = shape.processes // shape.shards
    if kind == "all-reduce":  # between replicas
        return 2 * (replicas - 1) / replicas
    return (shape.shards - 1) / shape.shards


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

    With `several_chunks` of logits, the last is a smaller one, which must not be extrapolated.
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


def _messages(trace: LiveBytes, micro: int) -> Counter[str]:
    """Bytes of the full tensors of each kind of collective in a micro-batch."""
    found: Counter[str] = Counter()
    for ((*_, at), kind), size in trace.traffic.items():
        if at == micro or (at == "update" and micro == 1):  # Muon gathers its updates
            found[kind] += size
    return found


@dataclass(frozen=True)
class WritingMemory:
    """The maximum bytes to write a snapshot, in addition to weights and optimizer."""

    on_device: int
    """On the device of each process. On a CPU, only the process that writes needs it."""
    on_host: int
    """CPU memory of each process that writes; 0 if the device is the CPU."""
    copies: int
    """More CPU memory for `snapshot.staging_bytes`; the run takes less if less is free."""


def writing_memory(
    config: ModelConfig, shape: Shape, staging_bytes: int, offload: bool
) -> WritingMemory:
    """The peak of `snapshot.disk.writing.begin_snapshot`, without a step at the same time.

    Under FSDP each process writes its own shards.
    """
    layout = layout_for(config)
    layout.freeze(shape.freeze)
    prefix = WHOLE if config.lora is None else ADAPTERS
    held = layout.parameters() if config.lora is None else layout.adapters()
    moments = moment_counts(layout, shape.optimizer)
    total = sum(parameter.nbytes * (1 + moments.get(name, 0)) for name, parameter in held.items())
    largest = block = 0
    for name, parameter in held.items():
        largest = max(largest, parameter.nbytes // shape.shards)
        if layout.is_transposed(name):
            row = parameter.nbytes // parameter.shape[1]
            rows = min(parameter.shape[1], max(1, BLOCK_BYTES // row))
            block = max(block, rows * row // shape.shards)
    converted = 0  # tensors that are not stored as they are: their parameters are gathered first
    for group in written_as(layout, prefix):
        if group.convert is not None:
            converted = max(
                converted, FLOAT_BYTES * sum(prod(shape) for shape in group.shapes.values())
            )
    copies = min(staging_bytes, total // shape.shards)
    if shape.device == "cpu":
        gathered = converted if shape.shards > 1 else 0
        mapped = shape.shards > 1
        return WritingMemory(max(0 if mapped else block, gathered + converted), 0, copies)
    on_device = 2 * converted if shape.shards > 1 and not offload else 0
    return WritingMemory(on_device, max(largest + block, 2 * converted), copies)
