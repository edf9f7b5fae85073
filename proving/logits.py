"""Whether transformers computes from a snapshot what this project computes."""

from __future__ import annotations

import gc
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from model.causal_lm import quiet_transformers
from model.families import build_empty
from snapshot.disk.load import restore_weights
from snapshot.disk.model import WHOLE, model_of, prefix_of

TOKENS = 64
TOLERANCE = 1e-4
"""Of the largest logit, or of 1: kernels that sum in another order differ by much less."""
ENLARGED, OF_ENLARGED = 5.0, 1e-5
"""New matrices get about the size of trained ones, so that activations are no straight lines, and
their tolerance: another activation makes 1e-4, rounding 1e-6."""


def why_not_comparable(folder: Path) -> str | None:
    """Why transformers cannot load this snapshot alone; None if it can."""
    if prefix_of(folder) != WHOLE:
        return "it holds adapters (LoRA); python -m snapshot merge writes the whole model"
    sizes = model_of(folder)
    if not sizes.in_transformers:
        return f"its config.json names no class of transformers ({sizes.family})"
    return None if find_spec("transformers") else "transformers is not installed"


@torch.no_grad()
def compare_logits(folder: Path, is_new: bool) -> tuple[bool | None, str]:
    """Whether transformers computes our logits from a verified snapshot, and a sentence about it.

    `is_new`: it began with random weights. None: transformers cannot load it.
    """
    if (reason := why_not_comparable(folder)) is not None:
        return None, reason
    times, tolerance = (ENLARGED, OF_ENLARGED) if is_new else (1.0, TOLERANCE)
    sizes = model_of(folder)
    ids = (torch.arange(min(TOKENS, sizes.block_size)) * 7919 % sizes.vocab_size)[None]  # (1, T)

    def logits_of(model: Any) -> Any:
        for parameter in model.eval().parameters():
            if parameter.dim() > 1:
                parameter.mul_(times)
        return model(ids)

    model = build_empty(sizes)
    restore_weights(folder, model)
    ours = logits_of(model)  # (1, T, V)
    del model
    gc.collect()  # two models do not need to be in memory at once
    from transformers import AutoModelForCausalLM

    quiet_transformers()
    only_local = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        other, found = load(folder, dtype=torch.float32, output_loading_info=True, **only_local)
    except MemoryError:
        raise
    except Exception as error:  # each architecture raises its own types
        what = (str(error).splitlines() or [""])[0]
        return False, f"transformers cannot load {folder}: {what:.200}"
    if others := sorted({*found["missing_keys"], *found["unexpected_keys"]}):
        return False, f"transformers names other tensors than {folder}: {others[0]!r}"
    theirs = logits_of(other).logits
    scale = max(1.0, ours.abs().max().item())
    difference = (ours - theirs).abs().max().item()
    if not difference <= tolerance * scale:
        return False, (
            f"{folder} is another model for transformers: its logits differ by up to "
            f"{difference:.2g} (largest logit {scale:.2g}). The code of the model does not "
            "compute what config.json describes. docs/models.md says how to name another model"
        )
    return True, f"its logits, matrices times {times:g}, differ by {difference:.0e} at most"
