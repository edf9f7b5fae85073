"""The memory of a step, counted byte by byte: what each tensor is for, and where in the step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from planning.allocation_log import LiveBytes


@contextmanager
def track_kinds(memory: LiveBytes, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Record the allocations of a step that is not the first, each with its kind."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    memory.mark(model.parameters(), "parameters")
    memory.mark((one.grad for one in parameters), "gradients")  # DDP's buckets
    for state in optimizer.state.values():
        memory.mark(state.values(), "optimizer")
    hooks = [
        one.register_post_accumulate_grad_hook(lambda one: memory.mark([one.grad], "gradients"))
        for one in parameters
    ]
    with memory:
        yield
    for hook in hooks:
        hook.remove()
