"""What writing a snapshot takes of memory, worked out from the tensors in its files."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model.gpt import GPT, GPTConfig
from planning.fake_trace import Shape
from snapshot.disk.contents import MOMENTS
from snapshot.disk.gpt2_layout import is_transposed
from snapshot.disk.tensors import plan_pieces


@dataclass(frozen=True)
class Written:
    """Bytes, at most, beside what a process keeps between updates."""

    on_device: int
    """On each process's device; on a CPU all of it, on the process that writes."""
    on_host: int
    """In the machine's memory, on the process that writes; 0 where that is the device."""


def written(config: GPTConfig, shape: Shape, piece_bytes: int, offload: bool) -> Written:
    """What `snapshot.disk.state.begin_snapshot` holds at once where it is not beside a step."""
    with torch.device("meta"):
        weights = {name: p.nbytes for name, p in GPT(config).named_parameters()}
    moments = {f"{name}.{moment}": weights[name] for name in weights for moment in MOMENTS}
    device = host = 0
    gathered = 0  # of the tensor before, which is let go when the next is whole
    for stem, sizes in (("model", weights), ("optimizer", moments)):
        for piece in plan_pieces(sizes, stem, piece_bytes).values():
            held = 0  # of the file's tensors, in the machine's memory
            for name in piece:
                size = sizes[name]
                parameter = name if stem == "model" else name.rsplit(".", 1)[0]
                copied = size if is_transposed(parameter) else 0
                if shape.device == "cuda" and shape.shards > 1 and not offload:
                    device = max(device, gathered + size, size + copied)
                    gathered = size
                    held += size
                elif shape.device == "cuda" or shape.shards > 1:
                    host = max(host, held + gathered + size, held + size + copied)
                    gathered = copied if shape.shards > 1 else 0
                    held += size
                else:  # what is not transposed is written from where it is
                    held += copied
                host = max(host, held)
    return Written(host, 0) if shape.device == "cpu" else Written(device, host)
