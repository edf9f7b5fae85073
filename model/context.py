"""Context parallelism: several processes share the positions of each sequence.

A process computes its own positions alone, but for attention. There it gathers the keys and values
of all. Or it exchanges its positions for heads (Jacobs et al., 2023): it gets all positions of an
Nth of the heads, and gives back what they attended to.

Later positions attend to more keys. So of 2N equal chunks of a sequence, process i of N has chunk i
and, counted from the end, chunk i again: the work is then equal.

Letters in shapes: B rows, H heads, T positions, P = T / N positions of a process, D channels of a
head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.documents import SIXTEEN_BITS, Seen, begins_of, seen_by, varlen_attention
from model.head import IGNORED, target_count
from model.tensor import TensorGroup


class Context:
    """The processes that share sequences, and the sequences that they share now."""

    rows: SharedRows | None = None
    """Those of the forward pass that is being computed."""
    targets: Tensor | None = None
    """The targets (B, T) of the whole rows of that forward pass."""
    varlen: bool = False
    """Whether documents are attended to by torch's variable-length kernel."""

    def __init__(self, group: Any, by_heads: bool = False) -> None:
        """`group` is a process group of torch.distributed.

        With `by_heads`, attention exchanges positions for heads, whose numbers N divides.
        """
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self.by_heads = by_heads

    def around(self, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A model's `forward` that computes the loss of this process's positions.

        The processes must get the same whole sequences, of which T is a multiple of 2N. The mean of
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
            places = positions
            if places is None:
                places = torch.arange(ids.size(1), device=ids.device)[None]
            self.rows, self.targets = SharedRows(self, ids.size(1), positions), targets
            try:
                mean = compute(self.own(ids), own, self.own(places))
            finally:
                self.rows = self.targets = None
            return mean * (self.size * count / target_count(targets))

        return forward

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the processes, each of which computes a part of its gradient."""
        group = TensorGroup(self.group)
        # By five dimensions a plan knows what is sent for sequences.
        stacked = x.view((1,) * (5 - x.dim()) + x.shape)
        return group.sum_backward(group.leave(stacked)).view_as(x)

    def own(self, whole: Tensor) -> Tensor:
        """Of (B, T) this process's (B, P)."""
        chunks = whole.chunk(2 * self.size, dim=1)
        return torch.cat((chunks[self.rank], chunks[-1 - self.rank]), dim=1)

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, P, D) of this process to those of all, (B, H, T, D), in order."""
        from torch.distributed._functional_collectives import all_gather_single

        both = torch.stack((key, value))  # (2, B, H, P, D)
        gathered = all_gather_single(both, 0, self.group)
        keys, values = self._in_order(gathered.unflatten(0, (self.size, 2)))
        return keys, values

    def to_heads(self, *parts: Tensor) -> list[Tensor]:
        """Some (B, H, P, D) of this process's positions to (B, H / N, T, D) of its heads."""
        sent = torch.cat([one.unflatten(1, (self.size, -1)) for one in parts], dim=2)
        received = self._exchanged(sent.movedim(1, 0))  # (N, B, heads, P, D)
        sizes = [one.size(1) // self.size for one in parts]
        return [*self._in_order(received).split(sizes, dim=1)]

    def to_positions(self, mixed: Tensor) -> Tensor:
        """(B, H / N, T, D) of this process's heads to (B, H, P, D) of its positions."""
        chunks = mixed.unflatten(2, (2 * self.size, -1)).movedim(2, 0)
        pairs = torch.stack((chunks[: self.size], chunks[self.size :].flip(0)), dim=3)
        sent = pairs.flatten(3, 4)  # (N, B, H / N, P, D)
        return self._exchanged(sent).movedim(0, 1).flatten(1, 2)

    def _exchanged(self, sent: Tensor) -> Tensor:
        """Of (N, ...) the nth to process n, and of all what they send to this one, (N, ...)."""
        from torch.distributed._functional_collectives import all_to_all_single

        # What is received has the strides of what is sent.
        return all_to_all_single(sent.contiguous(), None, None, self.group)

    def _in_order(self, by_process: Tensor) -> Tensor:
        """(N, ..., P, D) of all processes to (..., T, D), in the order of positions."""
        chunks = by_process.unflatten(-2, (2, -1)).movedim(0, -4).flatten(-4, -3)
        # Those of a process are neighbours: the even ones ascend, the odd ones descend.
        order = [*range(0, 2 * self.size, 2), *range(2 * self.size - 1, 0, -2)]
        places = torch.tensor(order, device=by_process.device)
        return chunks.index_select(-3, places).flatten(-3, -2)

    def stretches(self, time: int) -> list[slice]:
        """Of T positions, the parts whose queries this process has in attention, in their order."""
        if self.by_heads:
            return [slice(0, time)]
        length, last = time // (2 * self.size), 2 * self.size - 1
        return [slice(n * length, (n + 1) * length) for n in (self.rank, last - self.rank)]


class SharedRows:
    """The rows of a batch of which each process has some positions, as attention takes them."""

    def __init__(self, context: Context, time: int, positions: Tensor | None) -> None:
        """`time` is T. Documents begin by the positions (B, T) of whole rows."""
        self._context, self._stretches = context, context.stretches(time)
        self._begins = None if positions is None else begins_of(positions)
        self._masks: dict[tuple[int, int | None, torch.dtype], Tensor] = {}
        self._seen: dict[int, tuple[Tensor, Seen]] = {}

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """As `model.documents.Rows.attend`, of this process's positions."""
        context = self._context
        query, key = query.to(value.dtype), key.to(value.dtype)
        if context.by_heads:
            query, key, value = context.to_heads(query, key, value)
        else:
            key, value = context.gather(key, value)
        parts = query.split([one.stop - one.start for one in self._stretches], dim=2)
        mixed = [
            self._attend(part, key, value, stretch, dropout_p, scale, window)
            for part, stretch in zip(parts, self._stretches, strict=True)
        ]
        whole = mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=2)
        return context.to_positions(whole) if context.by_heads else whole

    def _attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        stretch: slice,
        dropout_p: float,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        """Queries of a stretch of positions to keys and values of all, (B, H, T, D)."""
        keys, values = keys[:, :, : stretch.stop], values[:, :, : stretch.stop]
        if self._begins is not None and self._context.varlen and values.dtype in SIXTEEN_BITS:
            assert not dropout_p, "the kernel has no dropout"
            if stretch.start not in self._seen:
                self._seen[stretch.start] = seen_by(self._begins, stretch)
            bounds, seen = self._seen[stretch.start]
            return varlen_attention(query, keys, values, bounds, scale, window, seen)
        options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale}
        options["enable_gqa"] = keys.size(1) != query.size(1)
        if self._begins is None and (window is None or window >= stretch.stop):
            return attend_to_past(query, keys, values, **options)
        mask = self._mask(stretch, window, query)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, **options)

    def _mask(self, stretch: slice, window: int | None, query: Tensor) -> Tensor:
        """What is added to the scores, (B or 1, 1, queries, keys): 0 where a query sees a key."""
        place = stretch.start, window, query.dtype
        if place not in self._masks:
            every = torch.arange(stretch.stop, device=query.device)
            distance = every[stretch, None] - every
            sees = (distance >= 0)[None]
            if window is not None:
                sees = sees & (distance < window)
            if self._begins is not None:
                documents = self._begins[:, : stretch.stop].cumsum(dim=1)
                sees = sees & (documents[:, stretch, None] == documents[:, None])
            mask = torch.zeros(sees.shape, dtype=query.dtype, device=query.device)
            self._masks[place] = mask.masked_fill_(~sees, -math.inf)[:, None]
        return self._masks[place]


def attend_to_past(query: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
    """Attention in which the last query sees all keys, and each one before it a key less."""
    size = query.size(2), keys.size(2)
    if size[0] == size[1]:
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True, **options)
    if query.device.type == "cpu":  # without a kernel for it
        sees = torch.ones(size, dtype=torch.bool, device=query.device).tril(size[1] - size[0])
        mask = torch.zeros(size, dtype=query.dtype, device=query.device)
        mask = mask.masked_fill_(~sees, -math.inf)
    else:
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(*size)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, **options)
