"""torch's optimizers without the decorators that keep torch.compile out of them.

At their first call these import the compiler, which takes a second at every start. An optimizer is
not compiled here, so they would do nothing else.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import TypeVar

import torch
from torch.optim import Optimizer

Kind = TypeVar("Kind", bound=Optimizer)


class EagerOptimizer(Optimizer):
    """A torch.optim.Optimizer for use outside of compiled functions only."""

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)


@cache  # an optimizer is built more than once: snapshots ask one what it keeps
def eager(kind: type[Kind]) -> type[Kind]:
    """A class of torch.optim for use outside of compiled functions only, and not differentiable."""
    step = torch.no_grad()(inspect.unwrap(kind.step))
    return type(f"Eager{kind.__name__}", (EagerOptimizer, kind), {"step": step})
