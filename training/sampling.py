"""A text of the model's own, in the middle of training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from accelerate import Accelerator

from data.tokenizer import CharTokenizer
from model.generate import BrokenModel, generate
from model.gpt import GPT, parameter_count
from snapshot.disk.sharded import reshard
from training.exits import TrainingStopped
from training.memory import available_memory

CHARACTERS = 400


def sample_text(accelerator: Accelerator, model: GPT, tokenizer: CharTokenizer, seed: int) -> str:
    """A short text. Every process must call this, with its unwrapped model, and gets the same.

    Raises TrainingStopped where the weights are broken.
    """
    beginning = tokenizer.encode(tokenizer.beginning).astype("int64")
    prompt = torch.from_numpy(beginning)[None].to(accelerator.device)
    # Compiled in place, as FSDP's are, blocks would be compiled anew for each layer's cache.
    with _blocks_kept_whole(accelerator, model), torch.compiler.set_stance("force_eager"):
        drawn = generate(model, prompt, CHARACTERS, temperature=0.8, top_k=200, seed=seed)
        try:
            return tokenizer.decode([int(token) for token in drawn])
        except BrokenModel as error:
            raise TrainingStopped(str(error)) from error


@contextlib.contextmanager
def _blocks_kept_whole(accelerator: Accelerator, model: GPT) -> Iterator[None]:
    """Have FSDP gather each block once instead of once for every character, where there is room."""
    if not accelerator.is_fsdp2 or not accelerator.state.fsdp_plugin.reshard_after_forward:
        yield
        return
    width = 4 if accelerator.mixed_precision == "no" else 2
    free = torch.tensor([_free_bytes(accelerator)], device=accelerator.device)
    if 2 * width * parameter_count(model) > accelerator.gather(free).min():
        yield
        return
    _reshard_blocks_after_forward(model, False)
    try:
        yield
    finally:
        _reshard_blocks_after_forward(model, True)
        reshard(model)


def _reshard_blocks_after_forward(model: GPT, value: bool) -> None:
    for block in model.transformer.h:
        block.set_reshard_after_forward(value)  # type: ignore[operator]


def _free_bytes(accelerator: Accelerator) -> int:
    """Memory of this process's device that nobody uses, or torch keeps for nothing."""
    device = accelerator.device
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + idle
    return available_memory() // accelerator.num_processes
