"""Folders of models as their repos on the Hub have them, with tiny random weights.

real_models/<name>/ has the entries of the real files. Sizes are smaller, and special tokens have
the numbers that a vocabulary of a few hundred gives them. transformers writes more into these files
than the repos have, so tests with folders that it has just saved see other models than users do.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

FOLDERS = Path(__file__).parent / "real_models"
NAMES = sorted(path.name for path in FOLDERS.iterdir())
EMBEDDINGS = ("wte.weight", "embed_tokens.weight")


def make(name: str, folder: Path, **entries: Any) -> Path:
    """Write the folder of a model, with `entries` of config.json; returns it."""
    shutil.copytree(FOLDERS / name, folder)
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **entries}
    path.write_text(json.dumps(config, indent=2))
    torch.manual_seed(11)
    known = {key: value for key, value in config.items() if key != "auto_map"}
    dtype = getattr(torch, config.get("torch_dtype", "float32"))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**known), dtype=dtype)
    model.save_pretrained(folder / "written")
    tensors = load_file(folder / "written" / "model.safetensors")
    shutil.rmtree(folder / "written")
    save_file(_as_in_the_repo(name, tensors), folder / "model.safetensors", {"format": "pt"})
    return folder


def _as_in_the_repo(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a repo, which differ from those that transformers writes."""
    mask = torch.ones(48, 48).tril()[None, None]
    match name:
        case "gpt2":  # OpenAI's own: without the prefix, and with the mask of each layer
            bare = {key.removeprefix("transformer."): value for key, value in tensors.items()}
            return bare | {f"h.{layer}.attn.bias": mask.clone() for layer in range(2)}
        case "distilgpt2":  # the tied output layer a second time, and the masks
            masks = {f"transformer.h.{layer}.attn.bias": mask.clone() for layer in range(2)}
            return tensors | masks | {"lm_head.weight": tensors["transformer.wte.weight"].clone()}
        case "Llama-2-7b-hf":  # constants of older transformers
            inverse = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(2)}
            return tensors | {key: torch.ones(4) for key in inverse}
    return tensors


def give_output(folder: Path) -> Path:
    """Add another output layer to the weights of a model whose config ties it; the folder."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    embedding = next(value for key, value in tensors.items() if key.endswith(EMBEDDINGS))
    torch.manual_seed(13)
    output = {"lm_head.weight": torch.randn_like(embedding)}
    save_file(tensors | output, path, {"format": "pt"})
    return folder
