"""An output layer whose rows several processes share: logits and their loss over all rows.

Letters in shapes: N positions, V vocabulary, R rows of a process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from model.sharded import Cut


def summed(x: Tensor, group: Any, operation: str = "sum") -> Tensor:
    """The sum, or the maximum, of x over processes."""
    from torch.distributed._functional_collectives import all_reduce, wait_tensor

    return wait_tensor(all_reduce(x.contiguous(), operation, group))


class Vocabulary:
    """The rows of an output layer that this process has."""

    def __init__(self, group: Any, size: int, ignored: int) -> None:
        """`group` is a process group, `size` that of the whole vocabulary.

        Targets of `ignored` do not count.
        """
        self.group, self.size, self.ignored = group, size, ignored
        (self.rows,) = Cut((size,), group, 0).ranges()
        self.most = -(-size // group.size())
        """The rows of a process, at most."""

    def own(self, targets: Tensor) -> Tensor:
        """Targets (N) counted from this process's first row; those of others are ignored."""
        has = (targets >= self.rows.start) & (targets < self.rows.stop)
        return torch.where(has, targets - self.rows.start, self.ignored)

    def log_softmax(self, logits: Tensor) -> Tensor:
        """This process's part, in float32, of the logarithms over the whole vocabulary."""
        logits = logits.float()
        logits = logits - summed(logits.amax(-1, keepdim=True), self.group, "max")
        return logits.sub_(summed(logits.exp().sum(-1, keepdim=True), self.group).log())

    def sum(self, number: Tensor) -> Tensor:
        """The sum of a number over processes."""
        return summed(number, self.group)

    def gather(self, logits: Tensor) -> Tensor:
        """The logits (..., V) of this process's rows, (..., R), and of all others."""
        return Cut((*logits.shape[:-1], self.size), self.group, logits.dim() - 1).gather(logits)
