"""The memory of an update, from two traces at its micro-batch.

A deep model takes long to trace. Every allocation is constant or proportional to the layers, so two
shallow models of the same width and micro-batch give a line over depth for the peak of each part of
an update. The parts are as small as a block at either end, because the one that has the peak
depends on the depth: activations shrink in the backward pass while gradients grow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache

import numpy as np

from model.family import ModelConfig
from planning.allocation_log import KINDS, Place
from planning.fake_trace import Shape, traced_update

SHALLOW, DEEP = 5, 6
"""Layers of the traced models: two at each end may differ from the others, because FSDP prefetches.
"""
Parts = dict[Place, np.ndarray]
"""Live bytes (events, kinds) in each part of an update."""


def peak_bytes(
    config: ModelConfig,
    shape: Shape,
    micro_batch_size: int,
    accumulating: bool,
    kinds: Sequence[str] = KINDS,
) -> float:
    """The largest total of these kinds of tensors, over the parts that both depths have.

    `accumulating`: whether a step has several micro-batches.
    """
    # One layer may be frozen and the next not: only the real depth has its pattern.
    is_whole = config.n_layer <= DEEP or shape.freeze
    depths = (config.n_layer,) * 2 if is_whole else (SHALLOW, DEEP)
    shallow, deep = (traced_parts(config, depth, micro_batch_size, shape) for depth in depths)
    counted = [kind in kinds for kind in KINDS]
    peaks = []
    for place in shallow.keys() & deep.keys():
        if accumulating or place[1:2] != (1,):  # otherwise there is no second micro-batch
            low, high = (
                float(parts[place][:, counted].sum(axis=1).max()) for parts in (shallow, deep)
            )
            peaks.append(low + (config.n_layer - depths[0]) * (high - low))
    return max(peaks)


@cache
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
