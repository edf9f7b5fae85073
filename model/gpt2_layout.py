"""The boundary between our modules and GPT-2's files.

Parameter names are the same on both sides. GPT-2 stores the weights of its projections as
(inputs, outputs), the transpose of `nn.Linear`; the tied output layer is not stored. No other file
of the project transposes weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from model.gpt import ACTIVATIONS, GPT, GPT2, GPTConfig
from model.layout import Layout, ModelError, Shape, Stored, Written, refuse_unless_tied

CLASS = "GPT2LMHeadModel"
ACTIVATION_NAMES = " or ".join(ACTIVATIONS)

OUTPUT = "lm_head.weight"
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def is_transposed(name: str) -> bool:
    """Whether GPT-2's files store this parameter, and so its moments, transposed."""
    return name.endswith(TRANSPOSED)


def to_gpt2_layout(name: str, tensor: Tensor) -> Tensor:
    """A full parameter (or a moment of it) in the layout of GPT-2's files, contiguous.

    Returns the tensor itself if it has that layout.
    """
    if is_transposed(name) and tensor.ndim == 2:  # the optimizer's step is a scalar
        return tensor.t().contiguous()
    return tensor.contiguous()


def gpt2_config(shape: dict[str, Any]) -> dict[str, Any]:
    """transformers' GPT2Config for a model with the fields of our GPTConfig.

    A GPTConfig of another `family` names no class of transformers, which then refuses to load it.
    """
    described = {"architectures": [CLASS]} if GPTConfig.family == GPT2 else {}
    return {
        **described,
        "model_type": GPTConfig.family,
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


def gpt2_tensors(config: dict[str, Any]) -> dict[str, Shape]:
    """Names and shapes of the tensors that transformers expects with such a config.json."""
    width: int = config["n_embd"]
    inner = 4 * width
    block: dict[str, Shape] = {
        "ln_1.weight": (width,),
        "ln_1.bias": (width,),
        "attn.c_attn.weight": (width, 3 * width),
        "attn.c_attn.bias": (3 * width,),
        "attn.c_proj.weight": (width, width),
        "attn.c_proj.bias": (width,),
        "ln_2.weight": (width,),
        "ln_2.bias": (width,),
        "mlp.c_fc.weight": (width, inner),
        "mlp.c_fc.bias": (inner,),
        "mlp.c_proj.weight": (inner, width),
        "mlp.c_proj.bias": (width,),
    }
    layers = range(config["n_layer"])
    return {
        "transformer.wte.weight": (config["vocab_size"], width),
        "transformer.wpe.weight": (config["n_positions"], width),
        **{f"transformer.h.{i}.{name}": shape for i in layers for name, shape in block.items()},
        "transformer.ln_f.weight": (width,),
        "transformer.ln_f.bias": (width,),
    }


def gpt_shape(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of our GPTConfig from a config.json. Raises ModelError for another model."""
    names = {
        "vocab_size": "vocab_size",
        "block_size": "n_positions",
        "n_layer": "n_layer",
        "n_head": "n_head",
        "n_embd": "n_embd",
    }
    if not isinstance(config, dict) or config.get("model_type") != GPTConfig.family:
        raise ModelError(f"config.json is not that of a {GPTConfig.family}")
    if any(type(config.get(theirs)) is not int for theirs in names.values()):
        raise ModelError(f"config.json lacks one of {', '.join(names.values())}")
    activation = config.get("activation_function")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ModelError(f"config.json has an activation_function that is not {ACTIVATION_NAMES}")
    return {
        **{ours: config[theirs] for ours, theirs in names.items()},
        "activation_function": activation,
    }


def _has(shapes: Mapping[str, Shape], name: str) -> str:
    return f"has {name} {list(shapes[name])}" if name in shapes else f"has no {name}"


class GPT2Layout(Layout):
    """The layout of our GPT: GPT-2's."""

    def __init__(self, model: GPT) -> None:
        self._model = model

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._model.named_parameters()

    def refuse_undescribed(self) -> None:
        config = gpt2_config(vars(self._model.config))
        if config["model_type"] != GPT2:
            return
        has = {name: shape for one in self.written() for name, shape in one.shapes.items()}
        expected = gpt2_tensors(config)
        for name in [*expected, *has]:
            if has.get(name) != expected.get(name):
                raise ModelError(
                    f"model/gpt.py {_has(has, name)}, and transformers' {CLASS}, which config.json "
                    f"names, {_has(expected, name)}. So transformers would load another model from "
                    "each snapshot. Give a model that is not GPT-2 a name of its own: "
                    "GPTConfig.family in model/gpt.py."
                )

    def is_transposed(self, name: str) -> bool:
        return is_transposed(name)

    def written(self) -> list[Written]:
        return [
            Written((name,), {name: tuple(one.shape)[:: -1 if is_transposed(name) else 1]})
            for name, one in self.parameters().items()
        ]

    def to_files(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: to_gpt2_layout(name, one) for name, one in parameters.items()}

    def find(self, shapes: Mapping[str, Shape]) -> dict[str, Stored]:
        known = self.parameters()
        found = {}
        for name in shapes:
            full = name if name in known else f"transformer.{name}"  # as OpenAI's own files have it
            if full in known:
                found[full] = Stored((name,), is_transposed(full))
            elif not name.endswith((".attn.bias", ".attn.masked_bias")):  # constants of old files
                refuse_unless_tied(name, shapes, OUTPUT, self._model)
        if OUTPUT in shapes:  # of a file that holds the tied tensor by this name alone
            found.setdefault(self.embedding_name(), Stored((OUTPUT,)))
        return found
