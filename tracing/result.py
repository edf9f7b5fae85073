"""What a trace has counted, and what the planner predicts for it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from accelerate import Accelerator
from torch import nn

from config.schema import Config, lora_of
from model.causal_lm import ModelConfig
from planning.allocation_log import LiveBytes
from planning.estimate import estimate_memory
from planning.fake_trace import Shape
from tracing.ranges import PREPARE, UPDATES
from tracing.spans import NORM, Collective, Process
from training.distributed.strategy import bucket_parameters, unwrapped
from training.run.accelerator import micro_batch_shape


@dataclass
class Result:
    """The shape of a run, and what was counted in this process."""

    name: str
    model: ModelConfig
    block_size: int
    """The length of the run's sequences, which a model's context may exceed."""
    shape: Shape
    micro_batch_size: int
    accumulation: int
    weights: int
    """Bytes of the model's parameters and buffers."""
    trained: int
    """Number of trained tensors."""
    buckets: list[list[str]]
    """The parameters of each of DDP's buckets."""
    memory: np.ndarray
    """Live bytes (events, kinds) in the counted step."""
    places: list[str]
    """The part of the step of each event."""
    predicted_traffic: dict[str, float] = field(default_factory=dict)
    predicted_peak: float | None = None

    @classmethod
    def of(
        cls,
        accelerator: Accelerator,
        config: Config,
        model: nn.Module,
        memory: LiveBytes,
        attention: str | None,
    ) -> Result:
        """Collect the result of an attempt that computes attention this way.

        A sharded model has its full sizes here as well.
        """
        bare: Any = unwrapped(accelerator, model)
        tensors = [*bare.parameters(), *bare.buffers()]
        sharding = accelerator.parallelism_config
        shards = accelerator.num_processes if accelerator.is_fsdp2 else 1
        if accelerator.is_fsdp2 and sharding is not None:
            shards = sharding.dp_shard_size
        totals = memory.log.totals()
        return cls(
            name=config.run.name,
            model=replace(bare.config, lora=lora_of(config.model)),
            block_size=config.data.block_size,
            shape=Shape(
                accelerator.device.type,
                accelerator.mixed_precision,
                accelerator.num_processes,
                shards,
                config.optim.name,
                tuple(config.optim.freeze),
                attention,
            ),
            micro_batch_size=micro_batch_shape(accelerator, config)[0],
            accumulation=accelerator.gradient_accumulation_steps,
            weights=sum(one.numel() * one.element_size() for one in tensors),
            trained=sum(one.requires_grad for one in bare.parameters()),
            buckets=bucket_parameters(model),
            memory=totals,
            places=[place[0] if place else "" for place in memory.log.places[: len(totals)]],
        )

    def predict(self) -> None:
        """Ask the planner, which must not happen while there is a process group."""
        accumulation = self.accumulation
        estimate = estimate_memory(self.model, self.shape)
        self.predicted_traffic = estimate.traffic(accumulation)
        if self.shape.shards > 1:  # the norms of all tensors, in float32
            self.predicted_traffic[NORM] = 4 * self.trained
        if self.block_size < self.model.block_size:
            shorter = replace(self.model, block_size=self.block_size)
            estimate = estimate_memory(shorter, self.shape)
        self.predicted_peak = estimate.peaks(self.micro_batch_size, accumulation > 1)["update"]


@dataclass(frozen=True)
class Row:
    """A kind of collective in a step of one process: counted, and predicted."""

    kind: str
    calls: int
    counted: int
    """Bytes of the full tensors."""
    predicted: float | None
    milliseconds: float
    overlapped: float
    """The share of the time in which the process also computed."""

    @property
    def ratio(self) -> float | None:
        """Counted bytes over predicted bytes."""
        return self.counted / self.predicted if self.predicted else None


def traffic_rows(process: Process, result: Result) -> list[Row]:
    """The collectives of a process by kind: at its start, in and around its last step."""
    step = process.within(process.steps[-1]).collectives
    start = [one for one in process.collectives if one.part == PREPARE and one.is_float]
    rows = [_row("broadcast of the weights, at the start", start, result.weights)]
    for kind in dict.fromkeys(one.name for one in step):
        update = [one for one in step if one.name == kind and one.part in UPDATES]
        others = [one for one in step if one.name == kind and one.part not in UPDATES]
        rows.append(_row(kind, update, result.predicted_traffic.get(kind, 0.0)))
        rows.append(_row(f"{kind}, agreement to stop", others, None))
    return [row for row in rows if row.calls]


def _row(kind: str, some: list[Collective], predicted: float | None) -> Row:
    microseconds = sum(one.end - one.start for one in some)
    covered = sum((one.end - one.start) * one.overlapped for one in some)
    return Row(
        kind,
        len(some),
        sum(one.size for one in some),
        predicted,
        microseconds / 1e3,
        covered / microseconds if microseconds else 0.0,
    )
