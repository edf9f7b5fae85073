"""Context parallelism: several processes share the positions of each sequence.

A process computes its own positions alone, but for attention, where it gathers the keys and values
of all. Later positions attend to more of them. So of 2N equal chunks of a sequence, process i of N
has chunk i and, counted from the end, chunk i again: the work is then equal.

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

from model.documents import begins_of
from model.head import IGNORED


class Context:
    """The processes that share sequences, and the sequences that they share now."""

    rows: SharedRows | None = None
    """Those of the forward pass that is being computed."""

    def __init__(self, group: Any) -> None:
        """`group` is a process group of torch.distributed."""
        self.group, self.size, self.rank = group, group.size(), group.rank()

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
            total, count = (targets != IGNORED).sum(), (own != IGNORED).sum()
            # The mean over no targets is not a number, and over any one it counts 0 times below.
            own[0, 0] = torch.where(count == 0, 0, own[0, 0])
            places = positions
            if places is None:
                places = torch.arange(ids.size(1), device=ids.device)[None]
            self.rows = SharedRows(self, ids.size(1), positions)
            try:
                mean = compute(self.own(ids), own, self.own(places))
            finally:
                self.rows = None
            return mean * (self.size * count / total)

        return forward

    def own(self, whole: Tensor) -> Tensor:
        """Of (B, T) this process's (B, P)."""
        chunks = whole.chunk(2 * self.size, dim=1)
        return torch.cat((chunks[self.rank], chunks[-1 - self.rank]), dim=1)

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, P, D) of this process to those of all, (B, H, T, D), in order."""
        from torch.distributed._functional_collectives import all_gather_single

        both = torch.stack((key.to(value.dtype), value))  # (2, B, H, P, D)
        gathered = all_gather_single(both, 0, self.group)
        chunks = gathered.unflatten(0, (self.size, 2)).unflatten(4, (2, -1))
        chunks = chunks.permute(1, 2, 3, 0, 4, 5, 6).flatten(3, 4)  # (2, B, H, 2N, P / 2, D)
        # Those of a process are neighbours: the even ones ascend, the odd ones descend.
        order = [*range(0, 2 * self.size, 2), *range(2 * self.size - 1, 0, -2)]
        places = torch.tensor(order, device=key.device)
        keys, values = chunks.index_select(3, places).flatten(3, 4)
        return keys, values


class SharedRows:
    """The rows of a batch of which each process has some positions, as attention takes them."""

    def __init__(self, context: Context, time: int, positions: Tensor | None) -> None:
        """`time` is T. Documents begin by the positions (B, T) of whole rows."""
        self._context, self._time = context, time
        self._documents = None if positions is None else begins_of(positions).cumsum(dim=1)
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

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
        keys, values = self._context.gather(key, value)
        options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale}
        options["enable_gqa"] = key.size(1) != query.size(1)
        query = query.to(values.dtype)
        if self._documents is not None or (window is not None and window < self._time):
            mask = self._mask(window, query)
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, **options)
        # A chunk sees all keys before it, and its last query the last of its own.
        mixed, length = [], query.size(2) // 2
        for half, number in enumerate((self._context.rank, -1 - self._context.rank)):
            end = (number % (2 * self._context.size) + 1) * length
            part = query[:, :, half * length : (half + 1) * length]
            mixed.append(attend_to_past(part, keys[:, :, :end], values[:, :, :end], **options))
        return torch.cat(mixed, dim=2)

    def _mask(self, window: int | None, query: Tensor) -> Tensor:
        """What is added to the scores, (B or 1, 1, P, T): 0 where a query sees a key, else -inf."""
        if (window, query.dtype) not in self._masks:
            every = torch.arange(self._time, device=query.device)[None]  # (1, T)
            distance = self._context.own(every)[:, :, None] - every[:, None]  # (1, P, T)
            sees = distance >= 0
            if window is not None:
                sees = sees & (distance < window)
            if (documents := self._documents) is not None:
                own = self._context.own(documents)
                sees = sees & (own[:, :, None] == documents[:, None])
            mask = torch.zeros(sees.shape, dtype=query.dtype, device=query.device)
            self._masks[window, query.dtype] = mask.masked_fill_(~sees, -math.inf)[:, None]
        return self._masks[window, query.dtype]


def attend_to_past(query: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
    """Attention in which the last query sees all keys, and each one before it a key less."""
    size = query.size(2), keys.size(2)
    if query.device.type == "cpu":  # without a kernel for it
        sees = torch.ones(size, dtype=torch.bool, device=query.device).tril(size[1] - size[0])
        mask = torch.zeros(size, dtype=query.dtype, device=query.device)
        mask = mask.masked_fill_(~sees, -math.inf)
    else:
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(*size)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, **options)
