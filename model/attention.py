"""Causal attention, of our models and of those of transformers, in rows of several documents too.

A batch says where documents begin by its positions: one begins wherever they do not count on. Each
position attends to its own document alone. What every layer needs of them is derived once in a
forward pass, as `Rows`.

Letters in shapes: B rows, H heads, T positions, D channels of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

LONGEST_PRODUCTS = 512
"""The longest sequence for which a CPU computes products of matrices. They keep T * T weights for
the backward pass."""
QUERY_CHUNK_BYTES = 512
"""Divided by the bytes of a number, the queries of one matrix product: 128 in float32."""


@dataclass(frozen=True)
class Rows:
    """What the positions of a batch attend to; without a mask, all earlier ones."""

    mask: Tensor | None = None
    """(B, 1, T, T), added to the scores: 0 where a query may attend to a key, else -inf."""
    context: Any = None
    """The `model.context.Context` whose processes have some positions of each row."""


def rows_of(positions: Tensor) -> Rows:
    """The documents of rows with these positions (B, T).

    The mask has the dtype of the scores: of a boolean one every layer would make a copy for its
    backward pass.
    """
    kind = positions.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
    begins = F.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0), value=True)
    document = begins.cumsum(dim=1)  # counted from 1
    own = (document[:, :, None] == document[:, None, :]).tril()[:, None]
    mask = torch.zeros(own.shape, dtype=dtype, device=own.device)
    return Rows(mask=mask.masked_fill_(~own, -math.inf))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Rows | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    scale: float | None = None,
) -> Tensor:
    """Queries (B, H, T, D), and keys and values of perhaps fewer heads, to (B, H, T, D)."""
    if rows is not None and rows.context is not None:
        query, key = query.to(value.dtype), key.to(value.dtype)
        query, key, value = rows.context.to_heads(query, key, value)
        whole = replace(rows, context=None)
        mixed = attend(query, key, value, whole, dropout_p, scale=scale)
        return cast(Tensor, rows.context.to_positions(mixed))
    is_short = query.size(2) <= LONGEST_PRODUCTS
    if rows is None and is_causal and is_short and query.device.type == "cpu":
        return attend_by_products(query, key, value, dropout_p)
    mask = None if rows is None else rows.mask
    options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale}
    options |= {"enable_gqa": key.size(1) != query.size(1), "is_causal": is_causal and mask is None}
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)


def attend_by_products(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0) -> Tensor:
    """Causal `F.scaled_dot_product_attention` as matrix products, which a CPU computes faster.

    Queries, keys, values and the result are each (B, H, T, D). Each chunk of queries is multiplied
    only with the keys that it may attend to.
    """
    batch, heads, time, size = query.shape
    chunk = max(1, QUERY_CHUNK_BYTES // query.element_size())
    flat = (batch * heads, time, size)
    keys, values = key.reshape(flat), value.reshape(flat)
    mixed, end = [], 0
    for part in query.reshape(flat).split(chunk, dim=1):  # its gradient is one copy, a slice's two
        begin, end = end, end + part.size(1)
        mask = query.new_full((end - begin, end), -math.inf).triu(begin + 1)
        past = keys[:, :end].transpose(1, 2)
        scores = torch.baddbmm(mask, part, past, alpha=size**-0.5)  # (B * H, chunk, end)
        weights = F.dropout(scores.softmax(dim=-1), dropout_p)
        mixed.append(torch.bmm(weights, values[:, :end]).view(batch, heads, -1, size))
    # In memory (B, T, H, D), as the layer after attention takes it: no second copy is made there.
    return torch.cat([part.transpose(1, 2) for part in mixed], dim=1).transpose(1, 2)
