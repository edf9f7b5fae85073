"""Losses and gradients of models whose matrices several processes share.

accelerate launch tests/support/tensors.py FILE writes, by model and kind of rows, the largest
differences from one process that has them whole.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
import torch.distributed as dist
from accelerate import Accelerator

from contexts import SIZES, batches, loss_of, sizes
from model.causal_lm import PACKING
from model.families import build_model
from model.lora import Lora
from model.tensor import TensorGroup
from snapshot.disk.model import model_config

ADAPTED = {f"{one}, adapted": one for one in ("gpt2", "their llama", "their phi3")}
"""Models with adapters that drop some of their inputs."""
HEADS = {"num_key_value_heads": 4}


def config(name: str):
    """The configuration of a small model, whose heads so many processes can share."""
    if name in ADAPTED:
        return replace(config(ADAPTED[name]), lora=Lora(4, 8, dropout=0.2))
    if name in ("gpt2", "their gpt2"):
        return sizes(name)
    content = {**SIZES, "model_type": name.removeprefix("their ")}
    if dist.get_world_size() == 4:
        content = {**content, **HEADS}
    return model_config(content, name)


@torch.no_grad()
def shared_copy(model, name: str):
    """A model with the same weights, of which this process has its part."""
    copy = build_model(config(name)).train(model.training)
    if not copy.tensor_plan:
        return None
    copy.share_matrices(TensorGroup(dist.group.WORLD))
    copy.mark_cuts()
    for one, other in zip(model.parameters(), copy.parameters(), strict=True):
        other.copy_(other.cut.part_of(one))
    return copy


def differences(name: str) -> dict[str, tuple[float, float]]:
    """By kind of rows: of the loss, and of a gradient relative to the largest of its parameter."""
    torch.manual_seed(0)
    alone = build_model(config(name))
    for one in alone.parameters():  # biases begin as zeros
        one.data += 0.01 * torch.randn(one.shape)
    shared = shared_copy(alone, name)
    if shared is None:
        return {}
    found = {}
    for kind, batch in batches().items():
        losses = []
        for model in (alone, shared):
            torch.manual_seed(1)  # adapters drop the same inputs
            losses.append(loss_of(model, batch))
        shared.tensors.sum_gradients([one for one in shared.parameters() if one.cut.summed])
        pairs = zip(alone.parameters(), shared.parameters(), strict=True)
        worst = max(
            float(
                (other.grad - other.cut.part_of(one.grad)).abs().max()
                / one.grad.abs().max().clamp(1e-6)
            )
            for one, other in pairs
            if one.grad is not None  # a weight under an adapter has none
        )
        found[kind] = abs(float(losses[1] - losses[0])), worst
    ids = batches()["whole"][0][:, :7]
    with torch.no_grad():
        logits = [model.eval()(ids) for model in (alone, shared)]
    found["logits"] = float((logits[0] - logits[1]).abs().max()), 0.0
    return found


if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    names = ["gpt2", *(f"their {family}" for family in PACKING), *ADAPTED]
    if len(sys.argv) > 2:
        names = sys.argv[2:]
    content = {name: differences(name) for name in names}
    if accelerator.is_main_process:
        content["processes"] = accelerator.num_processes
        Path(sys.argv[1]).write_text(json.dumps(content))
    accelerator.end_training()
