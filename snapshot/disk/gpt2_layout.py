"""The boundary between our modules and GPT-2's files.

Parameter names are the same on both sides. GPT-2 stores the weights of its projections as
(inputs, outputs), the transpose of `nn.Linear`; the tied output layer is not stored. Nowhere else
in the project is a weight transposed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from model.gpt import ACTIVATIONS
from snapshot.errors import SnapshotError

KNOWN = " or ".join(ACTIVATIONS)

TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def is_transposed(name: str) -> bool:
    """Whether GPT-2's file holds the transpose of this parameter; its moments follow it."""
    return name.endswith(TRANSPOSED)


def to_file(name: str, tensor: Tensor) -> Tensor:
    """A whole parameter (or a moment of it) as GPT-2's files hold it: contiguous.

    The tensor itself where it lies like that already.
    """
    if is_transposed(name) and tensor.ndim == 2:  # not the optimizer's step, which is a number
        return tensor.t().contiguous()
    return tensor.contiguous()


def gpt2_config(shape: dict[str, Any]) -> dict[str, Any]:
    """transformers' GPT2Config for a model of this shape (the fields of our GPTConfig)."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": shape["vocab_size"],
        "n_positions": shape["block_size"],
        "n_ctx": shape["block_size"],
        "n_embd": shape["n_embd"],
        "n_layer": shape["n_layer"],
        "n_head": shape["n_head"],
        "n_inner": None,
        "activation_function": shape["activation_function"],
        "embd_pdrop": shape["dropout"],
        "attn_pdrop": shape["dropout"],
        "resid_pdrop": shape["dropout"],
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "use_cache": True,
        "dtype": "float32",
    }


def gpt_shape(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of our GPTConfig in a snapshot's config.json. Raises SnapshotError for others."""
    names = {
        "vocab_size": "vocab_size",
        "block_size": "n_positions",
        "n_layer": "n_layer",
        "n_head": "n_head",
        "n_embd": "n_embd",
    }
    if not isinstance(config, dict) or config.get("model_type") != "gpt2":
        raise SnapshotError("config.json is not that of a GPT-2")
    if any(type(config.get(theirs)) is not int for theirs in names.values()):
        raise SnapshotError(f"config.json lacks one of {', '.join(names.values())}")
    activation = config.get("activation_function")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise SnapshotError(f"config.json has an activation_function that is not {KNOWN}")
    return {
        **{ours: config[theirs] for ours, theirs in names.items()},
        "activation_function": activation,
    }
