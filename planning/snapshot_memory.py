"""The memory to write a snapshot, computed from its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from model.causal_lm import ModelConfig
from model.layout import FLOAT_BYTES
from planning.fake_trace import Shape
from snapshot.disk.architecture import layout_for
from snapshot.disk.entries import written_as
from snapshot.disk.optimizer_state import moment_counts
from snapshot.disk.reference import ADAPTERS, WHOLE
from snapshot.disk.tensor_files import BLOCK_BYTES


@dataclass(frozen=True)
class WritingMemory:
    """The maximum bytes to write a snapshot, in addition to weights and optimizer."""

    on_device: int
    """Bytes on the device of each process; on a CPU, all in the process that writes."""
    on_host: int
    """Bytes of CPU memory in each process that writes; 0 if the device is the CPU."""
    copies: int
    """Further bytes of CPU memory for `snapshot.staging_bytes`; fewer if less is free."""


def writing_memory(
    config: ModelConfig, shape: Shape, staging_bytes: int, offload: bool
) -> WritingMemory:
    """The peak of `snapshot.disk.state.begin_snapshot`, without a step at the same time.

    Under FSDP each process writes its own shards.
    """
    layout = layout_for(config)
    layout.freeze(shape.freeze)
    stem = WHOLE if config.lora is None else ADAPTERS
    held = layout.parameters() if config.lora is None else layout.adapters()
    moments = moment_counts(layout, shape.optimizer)
    total = sum(one.nbytes * (1 + moments.get(name, 0)) for name, one in held.items())
    largest = block = 0
    for name, parameter in held.items():
        largest = max(largest, parameter.nbytes // shape.shards)
        if layout.is_transposed(name):
            row = parameter.nbytes // parameter.shape[1]
            rows = min(parameter.shape[1], max(1, BLOCK_BYTES // row))
            block = max(block, rows * row // shape.shards)
    converted = 0  # what several parameters make, or a part of one, is gathered to be converted
    for group in written_as(layout, stem):
        if not group.is_direct:
            converted = max(
                converted, FLOAT_BYTES * sum(prod(one) for one in group.shapes.values())
            )
    copies = min(staging_bytes, total // shape.shards)
    if shape.device == "cpu":
        gathered = converted if shape.shards > 1 else 0
        mapped = shape.shards > 1
        return WritingMemory(max(0 if mapped else block, gathered + converted), 0, copies)
    on_device = 2 * converted if shape.shards > 1 and not offload else 0
    return WritingMemory(on_device, max(largest + block, 2 * converted), copies)
