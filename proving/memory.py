"""The peak of a step's tensors, as an attempt counts it and as plan.py predicts it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from config.schema import lora_of
from model.family import ModelConfig
from model.frozen import AUTO
from planning.allocation_log import LiveBytes
from planning.estimate import MemoryEstimate
from planning.fake_trace import Shape
from training.distributed.accelerator import (
    micro_batch_shape,
    replicas,
    unwrapped,
)
from training.distributed.sharing import context_size, tensor_size
from training.run.kernels import has_packed_rows
from training.run.session import Session


@contextmanager
def track_kinds(memory: LiveBytes, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Record the allocations of a step that is not the first, each with its kind."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    memory.mark(model.parameters(), "parameters")
    memory.mark((parameter.grad for parameter in parameters), "gradients")  # DDP's buckets
    for state in optimizer.state.values():
        memory.mark(state.values(), "optimizer")
    hooks = [
        parameter.register_post_accumulate_grad_hook(
            lambda parameter: memory.mark([parameter.grad], "gradients")
        )
        for parameter in parameters
    ]
    with memory:
        yield
    for hook in hooks:
        hook.remove()


@dataclass(frozen=True)
class Planned:
    """A session's attempt, as the planner knows it."""

    model: ModelConfig
    """With sequences of the run's length, which a model's context may exceed."""
    shape: Shape
    micro_batch_size: int
    accumulates: bool

    @classmethod
    def of(cls, session: Session, model: nn.Module) -> Planned:
        """The shape of a session's attempt."""
        accelerator, config, state = session.accelerator, session.config, session.state
        bare: Any = unwrapped(accelerator, model)
        tensor = tensor_size(accelerator)
        copies = replicas(accelerator) if accelerator.is_fsdp2 else accelerator.num_processes
        return cls(
            model=replace(
                bare.config, lora=lora_of(config.model), block_size=config.data.block_size
            ),
            shape=Shape(
                device=accelerator.device.type,
                precision=accelerator.mixed_precision,
                processes=accelerator.num_processes,
                shards=accelerator.num_processes // (copies * tensor),
                context=context_size(accelerator),
                tensor=tensor,
                optimizer=config.optim.name,
                freeze=tuple(config.optim.freeze),
                frozen_dtype=state.frozen_dtype or AUTO,
                attention=state.attention,
                packed=has_packed_rows(config, bare, state),
                sync_each=config.run.sync_each_micro_batch,
                reduce_dtype=config.run.reduce_dtype,
                fp8=None if bare.fp8 is None else bare.fp8.recipe,
            ),
            micro_batch_size=micro_batch_shape(accelerator, config)[0],
            accumulates=accelerator.gradient_accumulation_steps > 1,
        )

    def peak(self) -> float:
        """Predicted bytes of the update. There must be no process group."""
        estimate = MemoryEstimate(self.model, self.shape)
        return estimate.peaks(self.micro_batch_size, self.accumulates)["update"]
