"""Small random models of transformers, one of each kind of architecture, as folders."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from snapshot.named_model import find_model
from subword_folders import trained

VOCABULARY = 320
"""Rows of the embedding, of which the tokenizer has 300."""
SIZES = {"vocab_size": VOCABULARY, "max_position_embeddings": 48, "use_cache": True}
ROTARY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    **SIZES,
}
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
"""More entries of a mixture, for a loss that is in large part the load-balancing loss."""
FAMILIES: dict[str, dict] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False, **ROTARY},
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True, **ROTARY},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True, **ROTARY},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 8, **ROTARY},
    "mixtral": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        **ROTARY,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 48,
        "vocab_size": VOCABULARY,
        "activation_function": "gelu_new",
    },
    # What model/gpt.py does not compute, so transformers' own module is trained.
    "gpt2 other": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 48,
        "n_positions": 48,
        "vocab_size": VOCABULARY,
    },
}
"""By name, the entries of config.json."""
OTHERS: dict[str, dict] = {
    "qwen3 moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        **ROTARY,
    },
    "olmoe": {
        "model_type": "olmoe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "eos_token_id": 0,
        **ROTARY,
    },
    # Their blocks return a tuple; the first has one head of keys.
    "falcon": {
        "model_type": "falcon",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        **SIZES,
    },
    "bloom": {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, **SIZES},
}
"""More mixtures, and other kinds of blocks. Their rows are not packed."""


def make(
    family: str, folder: Path, pieces: bool = False, dtype: str = "float32", **entries: object
) -> Path:
    """Save a random model of a family; with `pieces` in several files. Returns the folder."""
    torch.manual_seed(7)
    content = {**{**FAMILIES, **OTHERS}[family], **entries}
    config = AutoConfig.for_model(content.pop("model_type"), **content)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size="30KB" if pieces else "1GB")
    trained(300).save(folder)
    assert len(list(folder.glob("*.safetensors"))) > 1 or not pieces
    return folder


def words(small: list[str], base: object, *more: str) -> list[str]:
    """The overrides of a small run that begins from a model, which has its own sizes."""
    own = [word for word in small if not word.startswith("model.n_")]
    return [*own, f"model.pretrained={base}", *more]


def theirs(folder: Path) -> PreTrainedModel:
    """The model of a folder, as transformers loads it, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def assert_computed_by_transformers(folder: Path) -> None:
    """A folder is a model with the same logits here and there."""
    ours, other = find_model(str(folder)).load().eval(), theirs(folder)
    ids = torch.randint(ours.config.vocab_size, (2, 20))
    with torch.no_grad():
        assert (ours(ids) - other(ids).logits).abs().max() < 1e-5
