"""Context parallelism: several processes share the positions of each sequence.

A process computes its own positions alone, but for attention (Ulysses; Jacobs et al., 2023). There
it exchanges positions for heads by an all-to-all: it gets all positions of an Nth of the heads, and
gives back what they attended to.

Letters in shapes: B rows, H heads, T positions, N processes, P = T / N positions of a process, D
channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from model.attention import Rows, rows_of
from model.head import IGNORED, target_count


class Context:
    """The processes that share sequences, and the sequences that they share now."""

    rows: Rows | None = None
    """Those of the forward pass that is being computed."""

    def __init__(self, group: Any) -> None:
        """`group` is a process group of torch.distributed, whose size divides the heads."""
        self.group, self.size, self.rank = group, group.size(), group.rank()

    def around(self, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A model's `forward` that computes the loss of this process's positions.

        The processes must get the same whole sequences, of which T is a multiple of N. The mean of
        their losses is the mean over all targets. Logits are computed by each process, of all
        positions.
        """

        def forward(
            ids: Tensor,
            targets: Tensor | None = None,
            positions: Tensor | None = None,
            cache: Any = None,
        ) -> Tensor:
            if targets is None:
                return compute(ids, None, positions, cache)
            own = self.own(targets)
            count = (own != IGNORED).sum()
            places = torch.arange(ids.size(1), device=ids.device)[None]
            rows = Rows() if positions is None else rows_of(positions)
            self.rows = replace(rows, context=self)
            try:
                mean = compute(
                    self.own(ids), own, self.own(places if positions is None else positions)
                )
            finally:
                self.rows = None
            return mean * (self.size * count / target_count(targets))

        return forward

    def own(self, whole: Tensor) -> Tensor:
        """Of (B, T) this process's (B, P)."""
        return whole.chunk(self.size, dim=1)[self.rank]

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """(B, H, P, D) of this process's positions to (B, H / N, T, D) of its heads."""
        if key.size(1) % self.size:  # each head of queries gets its own
            each = query.size(1) // key.size(1)
            key, value = (part.repeat_interleave(each, dim=1) for part in (key, value))
        parts = (query, key, value)
        sent = torch.cat([part.unflatten(1, (self.size, -1)) for part in parts], dim=2)
        received = self._exchanged(sent.movedim(1, 0))  # (N, B, heads, P, D)
        whole = received.movedim(0, 2).flatten(2, 3)  # (B, heads, T, D)
        return [*whole.split([part.size(1) // self.size for part in parts], dim=1)]

    def to_positions(self, mixed: Tensor) -> Tensor:
        """(B, H / N, T, D) of this process's heads to (B, H, P, D) of its positions."""
        sent = mixed.unflatten(2, (self.size, -1)).movedim(2, 0)  # (N, B, H / N, P, D)
        return self._exchanged(sent).movedim(0, 1).flatten(1, 2)

    def _exchanged(self, sent: Tensor) -> Tensor:
        """Of (N, ...) the nth to process n, and of all what they send to this one, (N, ...)."""
        from torch.distributed._functional_collectives import all_to_all_single

        # What is received has the strides of what is sent.
        return all_to_all_single(sent.contiguous(), None, None, self.group)
