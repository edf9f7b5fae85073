"""Dropout that costs little on a CPU.

torch draws a mask on a CPU one number at a time, in doubles, which takes a quarter of a small
model's training time. Here 64 random bits decide about four elements.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEVELS = 2**16
"""The probabilities of dropout on a CPU are multiples of 1 / LEVELS."""


def dropout(x: Tensor, probability: float) -> Tensor:
    """`F.dropout` in training: zeros with `probability`, and the rest scaled to the same mean.

    On a CPU the probability is rounded to a multiple of 1 / LEVELS. The mask is a function of the
    state of torch's default generator, as that of `F.dropout` is, but it is another one.
    """
    dropped = round(probability * LEVELS)
    if dropped in (0, LEVELS):
        return F.dropout(x, probability)
    words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64)
    numbers = words.random_(-(2**63), None).view(torch.int16)[: x.numel()].view(x.shape)
    kept = (numbers >= dropped - LEVELS // 2).to(x.dtype)
    return x * kept.mul_(LEVELS / (LEVELS - dropped))


class FastDropout(nn.Dropout):
    """`nn.Dropout` by `dropout`."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns x, in training with dropout; of the same shape and type."""
        return dropout(x, self.p) if self.training else x
