"""Attention in rows that hold several documents: each position attends to its own document alone.

A batch says where documents begin by its positions: one begins wherever they do not count on. What
the attention of every layer needs of them is derived once in a forward pass.

Letters in shapes: B rows, H heads, T positions, D channels of a head, N documents of all rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class Rows(Protocol):
    """What the positions of a batch attend to, other than all earlier ones of their row."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Queries (B, H, T, D), and keys and values of perhaps fewer heads, to (B, H, T, D).

        With `window`, a query sees itself and so many positions less one before it.
        """


@dataclass(frozen=True)
class PackedRows:
    """Where documents begin in the rows of a batch, as one kind of attention takes it."""

    mask: Tensor | None = None
    """(B, 1, T, T), added to the scores: 0 where a query may attend to a key, else -inf."""
    bounds: Tensor | None = None
    """(N + 1,) int32: the first position of each document over all rows, and their end. Torch's
    variable-length kernel computes nothing between documents, and needs no mask."""
    _windows: dict[int, Tensor] = field(default_factory=dict)
    """The mask of each length of a window, which the layers share."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """As `Rows.attend`."""
        if self.bounds is None:
            options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale}
            options["enable_gqa"] = key.size(1) != query.size(1)
            mask = self._mask(window)
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
        assert not dropout_p, "the kernel has no dropout"
        return varlen_attention(query, key, value, self.bounds, scale, window)

    def _mask(self, window: int | None) -> Tensor | None:
        """The mask, in which a query sees no key before its window."""
        if self.mask is None or window is None:
            return self.mask
        if window not in self._windows:
            far = torch.ones_like(self.mask[0, 0], dtype=torch.bool).tril(-window)
            self._windows[window] = self.mask.masked_fill(far, -math.inf)
        return self._windows[window]


def packed_rows(positions: Tensor, varlen: bool = False) -> PackedRows:
    """The documents of rows with these positions (B, T).

    With `varlen` they are bounds, where autocast computes in 16 bits. Otherwise they are a mask, in
    the type of the scores: of a boolean mask every layer would make a copy for its backward pass.
    """
    kind = positions.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
    begins = F.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0), value=True)
    if varlen and dtype in SIXTEEN_BITS:
        return PackedRows(bounds=_bounds(begins))
    document = begins.cumsum(dim=1)  # counted from 1
    own = (document[:, :, None] == document[:, None, :]).tril()[:, None]
    mask = torch.zeros(own.shape, dtype=dtype, device=own.device)
    return PackedRows(mask=mask.masked_fill_(~own, -math.inf))


@torch._disable_dynamo  # torch.compiler.disable would import the compiler in every start
def _bounds(begins: Tensor) -> Tensor:
    """The places (N + 1,) of what begins in (B, T), and the number of places.

    Their number is a shape, so the process waits here for the device, once in a forward pass.
    """
    first = begins.flatten().nonzero().flatten()
    return F.pad(first, (0, 1), value=begins.numel()).int()


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention within the documents that `bounds` (N + 1,) separate, by torch's kernel.

    Queries (B, H, T, D) to (B, H, T, D). Keys and values may have fewer heads. With `window`, a
    query sees itself and so many positions less one before it.
    """
    from torch.nn.attention.varlen import varlen_attn

    batch, heads, time, size = query.shape
    # The kernel is not in autocast's list; rotary positions make queries and keys float32.
    parts = (part.to(value.dtype).transpose(1, 2).flatten(0, 1) for part in (query, key, value))
    query, key, value = parts
    mixed = varlen_attn(
        query,
        key,
        value,
        bounds,
        bounds,
        time,  # a document is no longer
        time,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=key.size(1) != heads,
    )
    assert isinstance(mixed, Tensor)
    return mixed.view(batch, time, heads, size).transpose(1, 2)
