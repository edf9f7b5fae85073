"""The memory to write a snapshot, computed from the tensors in its files."""

from __future__ import annotations

from dataclasses import dataclass

from model.causal_lm import ModelConfig
from planning.fake_trace import Shape
from snapshot.disk.architecture import layout_for
from snapshot.disk.tensors import plan_pieces


@dataclass(frozen=True)
class WritingMemory:
    """The maximum bytes to write a snapshot, in addition to weights and optimizer."""

    on_device: int
    """On the device of each process; on a CPU, all of it in the process that writes."""
    on_host: int
    """In the CPU's memory, in the process that writes; 0 if the device is the CPU."""


def writing_memory(
    config: ModelConfig, shape: Shape, piece_bytes: int, offload: bool
) -> WritingMemory:
    """The peak of `snapshot.disk.state.begin_snapshot`, without a step at the same time."""
    layout = layout_for(config)
    held = layout.parameters() if config.lora is None else layout.adapters()
    weights = {name: parameter.nbytes for name, parameter in held.items()}
    moments = {
        f"{name}.{moment}": weights[name]
        for name, moments_of in layout.moments(shape.optimizer).items()
        for moment in moments_of
    }
    device = host = 0
    gathered = 0  # the previous tensor, which is freed when the next is gathered
    for stem, sizes in (("model", weights), ("optimizer", moments)):
        for piece in plan_pieces(sizes, stem, piece_bytes).values():
            in_file = 0  # the file's tensors so far, in the CPU's memory
            for name in piece:
                size = sizes[name]
                parameter = name if stem == "model" else name.rsplit(".", 1)[0]
                copied = size if layout.is_transposed(parameter) else 0
                if shape.device == "cuda" and shape.shards > 1 and not offload:
                    device = max(device, gathered + size, size + copied)
                    gathered = size
                    in_file += size
                elif shape.device == "cuda" or shape.shards > 1:
                    host = max(host, in_file + gathered + size, in_file + size + copied)
                    gathered = copied if shape.shards > 1 else 0
                    in_file += size
                else:  # tensors that are not transposed are written without a copy
                    in_file += copied
                host = max(host, in_file)
    return WritingMemory(host, 0) if shape.device == "cpu" else WritingMemory(device, host)
