"""The memory of an update, from two traces at its micro-batch.

A deep model takes long to trace. Every allocation is constant or proportional to the layers, so two
shallow models of the same width and micro-batch give a line over depth for the peak of each part of
an update. The parts are as small as a block at either end, because the one that has the peak
depends on the depth: activations shrink in the backward pass while gradients grow.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from model.family import ModelConfig
from planning.allocation_log import KINDS, Place
from planning.fake_trace import Shape, traced_update

SHALLOW, DEEP = 5, 6
"""Layers of the traced models: two at each end may differ from the others, because FSDP prefetches.
"""
Parts = dict[Place, np.ndarray]
"""Live bytes (events, kinds) in each part of an update."""


class MemoryEstimate:
    """Live bytes of a model under a shape, as a function of the sequences in a micro-batch."""

    def __init__(self, config: ModelConfig, shape: Shape) -> None:
        self.config, self.shape = config, shape
        # One layer may be frozen and the next not: only the real depth has its pattern.
        whole = config.n_layer <= DEEP or shape.freeze
        self._depths = (config.n_layer,) if whole else (SHALLOW, DEEP)
        self._traces: dict[int, list[Parts]] = {}

    def peak(
        self, micro_batch_size: int, accumulating: bool, elsewhere: tuple[str, ...] = ()
    ) -> float:
        """The largest total in bytes, without the kinds stored elsewhere."""
        return self._peak(micro_batch_size, accumulating, [kind not in elsewhere for kind in KINDS])

    def largest(self, kind: str, micro_batch_size: int, accumulating: bool) -> float:
        """The largest total of one kind, in bytes."""
        return self._peak(micro_batch_size, accumulating, [kind == one for one in KINDS])

    def _peak(self, micro_batch_size: int, accumulating: bool, counted: list[bool]) -> float:
        """The largest total of the counted kinds, over the parts that both depths have."""
        if micro_batch_size not in self._traces:
            self._traces[micro_batch_size] = [
                traced_parts(self.config, depth, micro_batch_size, self.shape)
                for depth in self._depths
            ]
        first, last = self._traces[micro_batch_size][0], self._traces[micro_batch_size][-1]
        peaks = []
        for place in first.keys() & last.keys():
            if accumulating or place[1:2] != (1,):  # otherwise there is no second micro-batch
                low, high = (
                    float(parts[place][:, counted].sum(axis=1).max()) for parts in (first, last)
                )
                peaks.append(low + (self.config.n_layer - self._depths[0]) * (high - low))
        return max(peaks)


def traced_parts(config: ModelConfig, depth: int, micro_batch_size: int, shape: Shape) -> Parts:
    """The live bytes of a model of `depth` layers in each part of an update.

    Blocks in the second half are numbered from the end, so that depths have parts in common.
    """
    log = traced_update(config.with_layers(depth), micro_batch_size, shape)
    parts: dict[Place, list[np.ndarray]] = defaultdict(list)
    for place, total in zip(log.places, log.totals(), strict=False):
        if len(place) == 3 and place[2] >= depth / 2:
            place = (*place[:2], place[2] - depth)
        if place:  # not before the update
            parts[place].append(total)
    return {place: np.stack(totals) for place, totals in parts.items()}
