"""Losses and gradients of models whose matrices several processes share.

accelerate launch tests/support/tensors.py FILE writes, by model and kind of rows, the largest
differences from one process that has them whole.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh

from contexts import SIZES, batches, loss_of, sizes
from model.causal_lm import PACKING
from model.families import build_model
from model.sharded import gather_full
from snapshot.disk.model import model_config

HEADS = {"num_key_value_heads": 4}


def config(name: str):
    """The configuration of a small model, whose heads so many processes can share."""
    if name in ("gpt2", "their gpt2"):
        return sizes(name)
    content = {**SIZES, "model_type": name.removeprefix("their ")}
    if dist.get_world_size() == 4:
        content = {**content, **HEADS}
    return model_config(content, name)


def differences(name: str) -> dict[str, tuple[float, float]]:
    """By kind of rows: of the loss, and of a gradient relative to the largest of its parameter."""
    torch.manual_seed(0)
    alone, shared = build_model(config(name)), build_model(config(name))
    if not shared.tensor_plan:
        return {}
    for one in alone.parameters():  # biases begin as zeros
        one.data += 0.01 * torch.randn(one.shape)
    shared.load_state_dict(alone.state_dict())
    shared.share_matrices(init_device_mesh("cpu", (dist.get_world_size(),)))
    layout, whole = shared.layout(), alone.layout().parameters()
    found = {}
    for kind, batch in batches().items():
        losses = [loss_of(model, batch) for model in (alone, shared)]
        worst = 0.0
        for name, other in layout.parameters().items():
            file, part = layout.place(name)  # query, key and value are three
            grad = whole[file].grad
            difference = gather_full(other.grad) - grad.chunk(part.count)[part.number]
            worst = max(worst, float(difference.abs().max() / grad.abs().max().clamp(1e-6)))
        found[kind] = abs(float(losses[1] - losses[0])), worst
    ids = batches()["whole"][0][:, :7]
    with torch.no_grad():
        logits = [model.eval()(ids) for model in (alone, shared)]
    found["logits"] = float((logits[0] - logits[1]).abs().max()), 0.0
    return found


if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    names = ["gpt2", *(f"their {family}" for family in PACKING)]
    if len(sys.argv) > 2:
        names = sys.argv[2:]
    content = {name: differences(name) for name in names}
    if accelerator.is_main_process:
        content["processes"] = accelerator.num_processes
        Path(sys.argv[1]).write_text(json.dumps(content))
    accelerator.end_training()
