"""Whether transformers computes from a snapshot what this project computes."""

from __future__ import annotations

import gc
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from model.causal_lm import quiet_transformers
from model.families import build_empty
from model.family import ModelConfig
from model.lora import INSTALL
from snapshot.disk.load import restore_weights
from snapshot.disk.model import WHOLE, prefix_of
from snapshot.errors import SnapshotError

TOKENS = 64
TOLERANCE = 1e-4
"""Of the largest logit, or of 1: kernels that sum in another order differ by much less."""


class OtherModel(SnapshotError):
    """A whole snapshot that is another model for transformers: a sentence with the difference."""


@torch.no_grad()
def compare_logits(
    folder: Path, sizes: ModelConfig, times: float = 1.0, tolerance: float = TOLERANCE
) -> str:
    """Compare the logits of a verified snapshot with those of transformers, in words.

    Where that is not possible the words say why. `times` enlarges all matrices: those of a new
    model are so small that it is nearly linear. Raises OtherModel if the logits differ by more than
    `tolerance` times the largest one, or times 1.
    """
    if (reason := _why_not(folder, sizes)) is not None:
        return f"not compared with transformers: {reason}"
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
    theirs = logits_of(_load_in_transformers(folder)).logits
    scale = max(1.0, ours.abs().max().item())
    difference = (ours - theirs).abs().max().item()
    if not difference <= tolerance * scale:
        raise OtherModel(
            f"{folder} is another model for transformers: its logits differ by up to "
            f"{difference:.2g} (largest logit {scale:.2g}). The code of the model does not "
            "compute what config.json describes. docs/models.md says how to name another model"
        )
    return f"as transformers computes them, within {difference:.0e}"


def _why_not(folder: Path, sizes: ModelConfig) -> str | None:
    if prefix_of(folder) != WHOLE:
        return (
            "the snapshot holds only adapters (LoRA). python -m snapshot merge writes the whole "
            "model, which transformers loads"
        )
    if not sizes.in_transformers:
        return f"its config.json names no class of transformers ({sizes.family})"
    if find_spec("transformers") is None:
        return f"transformers is not installed. {INSTALL}"
    return None


def _load_in_transformers(folder: Path) -> Any:
    """Raises OtherModel where names or shapes are not those that transformers expects."""
    from transformers import AutoModelForCausalLM

    quiet_transformers()
    only_local = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        model, found = load(folder, dtype=torch.float32, output_loading_info=True, **only_local)
    except MemoryError:
        raise
    except Exception as error:  # each architecture raises its own types
        what = (str(error).splitlines() or [""])[0]
        raise OtherModel(f"transformers cannot load {folder}: {what:.200}") from error
    for what, names in (("lacks", "missing_keys"), ("holds", "unexpected_keys")):
        if others := sorted(found[names]):
            raise OtherModel(f"{folder} {what} {others[0]!r} for transformers: it is another model")
    return model
