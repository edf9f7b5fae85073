"""Losses and gradients of models whose sequences or matrices several processes share.

accelerate launch tests/support/shared_models.py contexts|tensors FILE writes, by model and kind of
rows, the largest differences from one process that has them whole.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from families import ROTARY
from model.causal_lm import PACKING
from model.context import Context
from model.families import build_model
from model.gpt import GPTConfig
from model.head import IGNORED
from model.sharded import gather_full
from snapshot.disk.model import model_config

B, T, WINDOW = 3, 32, 9
SIZES = {
    **ROTARY,
    "num_local_experts": 4,
    "sliding_window": None,
    "pad_token_id": None,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": T, "vocab_size": 64}


def sizes(name: str, **entries: int):
    """The configuration of a small model: our GPT-2, or one of transformers."""
    if name == "gpt2":
        return GPTConfig(64, T, 2, 4, 32)
    content = GPT2 if name == "their gpt2" else {**SIZES, **entries}
    if "gemma" in name:
        content = {**content, "sliding_window": WINDOW}
    return model_config({**content, "model_type": name.removeprefix("their ")}, name)


def batches() -> dict[str, tuple[Tensor, ...]]:
    """Inputs, targets and perhaps positions, of one document a row, of several, and padded."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 64, (B, T), generator=generator)
    targets = ids.roll(-1, 1)
    positions = torch.stack([torch.arange(T).remainder(length) for length in (7, 20, T)])
    few = targets.clone()
    few[:, 3:] = IGNORED  # some process has no target at all
    return {"whole": (ids, targets), "documents": (ids, targets, positions), "few": (ids, few)}


def loss_of(model, batch: tuple[Tensor, ...]) -> Tensor:
    """The loss of a batch; the parameters have its gradients, and no others."""
    model.zero_grad()
    loss = model(*batch)
    loss.backward()
    return loss.detach()


def mean(tensor: Tensor) -> Tensor:
    """Over the processes."""
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def differences(name: str, shared_as: str) -> dict[str, tuple[float, float]]:
    """By kind of rows: of the loss, and of a gradient relative to the largest of its parameter."""
    torch.manual_seed(0)
    size, of_contexts = dist.get_world_size(), shared_as == "contexts"
    heads = {"num_key_value_heads": 4} if size == 4 and not of_contexts else {}
    alone, shared = (build_model(sizes(name, **heads)) for _ in range(2))  # without dropout
    if not (shared.can_share_context if of_contexts else shared.tensor_plan):
        return {}
    for one in alone.parameters():  # biases begin as zeros
        one.data += 0.01 * torch.randn(one.shape)
    shared.load_state_dict(alone.state_dict())
    if of_contexts:
        shared.share_context(Context(dist.group.WORLD))
    else:
        shared.share_matrices(init_device_mesh("cpu", (size,)))
    layout, whole = shared.layout(), alone.layout().parameters()
    others, found = layout.parameters(), {}
    for kind, batch in batches().items():
        losses, worst = [loss_of(model, batch) for model in (alone, shared)], 0.0
        for file, names in layout.by_file_name(others).items():  # query, key and value are three
            if (grad := whole[file].grad) is not None:  # an expert that no token uses has none
                gathered = torch.cat([gather_full(others[name].grad) for name in names])
                difference = (mean(gathered) - grad).abs().max() / grad.abs().max().clamp(1e-6)
                worst = max(worst, float(difference))
        found[kind] = abs(float(mean(losses[1]) - losses[0])), worst
    ids = batches()["whole"][0][:, :7]
    with torch.no_grad():
        logits = [model.eval()(ids) for model in (alone, shared)]
    found["logits"] = float((logits[0] - logits[1]).abs().max()), 0.0
    return found


if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    names = ("gpt2", *(f"their {one}" for one in PACKING))
    content = {name: differences(name, sys.argv[1]) for name in names}
    if accelerator.is_main_process:
        content["processes"] = accelerator.num_processes
        Path(sys.argv[2]).write_text(json.dumps(content))
    accelerator.wait_for_everyone()
    os._exit(0)  # as a run does: gloo's groups of a mesh may abort at the end of Python
