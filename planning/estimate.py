"""What a run of a model needs, for any number of layers and sequences, of four small traces.

Every allocation of an update, an evaluation or a sample is proportional to the layers, the
sequences, both or neither. So the total after each event is known for every model of a width once
it is known for two depths and two micro-batches; the peak is the largest of them. It is not
extrapolated itself: it moves.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from model.gpt import GPTConfig
from planning.allocation_log import KINDS, LiveBytes, Place
from planning.fake_trace import Shape, traced_phases

EDGE = 2
"""Layers at either end that may differ from those between: FSDP gathers the next one ahead."""
SHALLOW, DEEP = 2 * EDGE + 1, 2 * EDGE + 2
SIZES = (2, 3)
"""Sequences traced; a single one takes other kernels now and then."""

PHASES = ("update", "evaluation", "sampling")
"""Of a run, as far as they are traced."""

ByPlace = dict[Place, np.ndarray]
"""Live bytes (events, kinds) at the places that models of every depth have."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Live bytes and traffic as functions of the sequences in a micro-batch."""

    shape: Shape
    base: np.ndarray
    """Live bytes (events, kinds) of the fixed part."""
    per_sequence: np.ndarray
    first: np.ndarray
    """Which events there are also without accumulation (events,)."""
    phases: np.ndarray
    """Of each event, one of `PHASES` (events,)."""
    gathered: tuple[float, float]
    """Bytes of collective operations: in all micro-batches but the last, and in the last."""

    def totals(self, micro_batch_size: int, accumulating: bool) -> np.ndarray:
        """Live bytes (events, kinds)."""
        totals = self.base + micro_batch_size * self.per_sequence
        return totals if accumulating else totals[self.first]

    def peaks(
        self, micro_batch_size: int, accumulating: bool, elsewhere: tuple[str, ...] = ()
    ) -> dict[str, float]:
        """The largest total in each phase, of the kinds that are not kept elsewhere, in bytes."""
        here = [kind not in elsewhere for kind in KINDS]
        totals = self.totals(micro_batch_size, accumulating)[:, here].sum(axis=1)
        phases = self.phases if accumulating else self.phases[self.first]
        return {phase: float(totals[phases == phase].max()) for phase in PHASES}

    def largest(self, kind: str, micro_batch_size: int, accumulating: bool) -> float:
        """The most that there ever is of one kind, in bytes."""
        totals = self.totals(micro_batch_size, accumulating)
        return float(totals[:, KINDS.index(kind)].max())

    def sent(self, accumulation: int) -> float:
        """Bytes that one process sends in a step, by the ring algorithms of NCCL and gloo."""
        rest, last = self.gathered
        return (accumulation - 1) * rest + last


def estimate_memory(config: GPTConfig, shape: Shape) -> MemoryEstimate:
    """Trace small models of this width, and say what one of its depth needs."""
    layers = config.n_layer
    few = (layers, layers) if layers <= DEEP else (SHALLOW, DEEP)
    corners = {
        (depth, size): traced_phases(replace(config, n_layer=depth), size, shape)
        for depth in set(few)
        for size in SIZES
    }
    edge = layers if layers <= DEEP else EDGE
    known = {corner: _at_common_places(trace, corner[0], edge) for corner, trace in corners.items()}
    sequences = [_deepened(known, few, layers, size) for size in SIZES]
    places = [place for place, totals in sequences[0].items() for _ in totals]
    two, three = (np.concatenate(list(by_place.values())) for by_place in sequences)
    sent = [
        _line(low, high, few, layers)
        for low, high in (
            [_sent(corners[depth, SIZES[0]], shape, micro) for depth in few] for micro in (0, 1)
        )
    ]
    phases = np.array([_phase(place) for place in places])
    first = np.array([place[1:2] != (1,) for place in places])  # all but the second micro-batch
    return MemoryEstimate(
        shape, 3 * two - 2 * three, three - two, first, phases, (sent[0], sent[1])
    )


def _phase(place: Place) -> str:
    """Of `PHASES`."""
    return place[1] if place[1:2] in (("evaluation",), ("sampling",)) else "update"


def _at_common_places(trace: LiveBytes, depth: int, edge: int) -> ByPlace:
    """The totals by place, layers counted from their nearer end; all but `edge` there left out.

    Between the ends totals only rise or only fall from layer to layer, so none is the largest.
    """
    events: dict[Place, list[np.ndarray]] = defaultdict(list)
    totals = trace.log.totals()
    # Births alone: a peak is always one, and what dies between two of them dies in any order, such
    # as autocast's copies of the weights.
    for lifetime in trace.log.lifetimes:
        place, total = trace.log.places[lifetime.born], totals[lifetime.born]
        if place and place[0] in ("forward", "backward"):
            name, micro, layer = place
            if edge <= layer < depth - edge:
                continue
            place = (name, micro, layer if layer < edge else layer - depth)
        if place:
            events[place].append(total)
    return {place: np.stack(totals) for place, totals in events.items()}


def _deepened(
    known: dict[tuple[int, int], ByPlace], few: tuple[int, int], layers: int, size: int
) -> ByPlace:
    """The totals at `layers` layers and `size` sequences, at the events that all corners share."""
    found = {}
    for place in known[few[0], size]:
        corners = [by_place[place] for by_place in known.values()]
        # Where the number of events itself depends on depth, the largest stands for all of them.
        same = len({len(totals) for totals in corners}) == 1
        low, high = (
            totals if same else totals[[totals.sum(axis=1).argmax()]]
            for totals in (known[depth, size][place] for depth in few)
        )
        found[place] = _line(low, high, few, layers)
    return found


def _line(low: Any, high: Any, few: tuple[int, int], layers: int) -> Any:
    """Through two points, at `layers`."""
    if few[0] == few[1]:
        return low
    return low + (layers - few[0]) * (high - low) / (few[1] - few[0])


def _sent(trace: LiveBytes, shape: Shape, micro: int) -> float:
    """Bytes that one process sends in a micro-batch."""
    replicas = shape.processes // shape.shards
    share = {
        "allgather": (shape.shards - 1) / shape.shards,
        "reduce_scatter": (shape.shards - 1) / shape.shards,
        "allreduce": 2 * (replicas - 1) / replicas,
    }
    return sum(
        share[operation] * size
        for ((_, at), operation), size in trace.traffic.items()
        if at == micro
    )
