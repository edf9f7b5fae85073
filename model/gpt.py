"""GPT-2 as published (Radford et al., 2019), in plain torch modules.

Letters in shapes: B batch, T time (positions), C channels (n_embd), H heads, D = C / H, V
vocabulary.

Module names are GPT-2's, so that parameters have the same names in a snapshot. Layers are plain
`nn.Linear`; only `GPT.layout` knows that GPT-2's files hold their weights transposed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.attention import Rows, attend
from model.family import LanguageModel, ModelConfig
from model.head import Head
from model.layout import Layout, ModelError, Shape

ACTIVATIONS = {"gelu_new": "tanh", "gelu": "none"}
"""By transformers' name, torch's `approximate`: GPT-2's tanh approximation, and the exact GELU."""

GPT2 = "gpt2"
"""transformers' name of GPT-2."""
NAMES = {
    "vocab_size": "vocab_size",
    "block_size": "n_positions",
    "n_embd": "n_embd",
    "n_layer": "n_layer",
    "n_head": "n_head",
}
"""Our names of the sizes, and those of config.json."""
LARGEST_SIZE = 2**24
MOST_LAYERS = 20_000
"""Limits for sizes in a config.json, which is untrusted input."""
COMPUTED = {
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
    "quantization_config": None,
}
"""Entries of config.json that decide what is computed, with the values that this file computes."""
MATRICES = {
    "attn.c_attn": (1, 3),
    "attn.c_proj": (1, 1),
    "mlp.c_fc": (1, 4),
    "mlp.c_proj": (4, 1),
}
"""Inputs and outputs of a block's layers, in multiples of n_embd. GPT-2's files hold their weights
so, the transpose of `nn.Linear`'s."""


class KeyValueCache:
    """Keys and values of past positions, each (B, H, T, D), for every layer."""

    def __init__(self, n_layer: int) -> None:
        self.layers: list[tuple[Tensor, Tensor] | None] = [None] * n_layer

    @property
    def length(self) -> int:
        """The number of cached positions."""
        first = self.layers[0]
        return 0 if first is None else first[0].size(2)

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Append new positions (B, H, T, D) and return all of them."""
        cached = self.layers[layer]
        if cached is not None:
            key = torch.cat((cached[0], key), dim=2)
            value = torch.cat((cached[1], value), dim=2)
        self.layers[layer] = (key, value)
        return key, value


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm of float32 numbers. Under FSDP in mixed precision the weights have 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Attention(nn.Module):
    """Causal self-attention: each position attends to itself and to earlier ones."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.size = config.n_embd // config.n_head
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, rows: Rows | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        batch, time, _ = x.shape
        query, key, value = self.c_attn(x).chunk(3, dim=2)  # each (B, T, C)
        by_head = (batch, time, -1, self.size)
        query = query.view(by_head).transpose(1, 2)  # (B, H, T, D), as the next two
        key = key.view(by_head).transpose(1, 2)
        value = value.view(by_head).transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        # A single new position attends to all cached ones. Several positions need the causal mask,
        # which is correct only for an empty cache; GPT.forward ensures that.
        dropout = self.dropout if self.training else 0.0
        mixed = attend(query, key, value, rows, dropout, is_causal=time > 1)
        mixed = mixed.transpose(1, 2).reshape(batch, time, -1)  # (B, H, T, D) -> (B, T, C)
        return self.resid_dropout(self.c_proj(mixed))


class MLP(nn.Module):
    """The position-wise feed-forward network around a GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.approximate = ACTIVATIONS[config.activation_function]

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate=self.approximate)))


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd)
        self.attn = Attention(config, layer)
        self.ln_2 = LayerNorm(config.n_embd)
        self.mlp = MLP(config)
        self.recompute = config.activation_checkpointing

    def forward(
        self, x: Tensor, rows: Rows | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        if self.recompute and self.training and cache is None:
            # Keep x alone for the backward pass, which computes the rest again with the same masks.
            return cast(Tensor, checkpoint(self._compute, x, rows, use_reentrant=False))
        return self._compute(x, rows, cache)

    def _compute(self, x: Tensor, rows: Rows | None, cache: KeyValueCache | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), rows, cache)
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """Embeddings, blocks and the final norm, with GPT-2's names."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        rows: Rows | None,
        cache: KeyValueCache | None,
    ) -> Tensor:
        """Token ids (B, T) at positions (T) or (B, T) to (B, T, C)."""
        # float32 even if the weights are frozen in 16 bits, or FSDP's have 16 bits.
        x = self.drop(self.wte(ids).float() + self.wpe(positions).float())
        for block in self.h:
            x = block(x, rows, cache)
        return self.ln_f(x)


@dataclass(frozen=True)
class GPTConfig(ModelConfig):
    """The sizes of a GPT-2, and what transformers needs to know to compute the same."""

    activation_function: str = "gelu_new"
    """One of `ACTIVATIONS`."""

    family = GPT2
    """A model that computes something else than GPT-2 needs another name, or transformers would
    load its snapshots as GPT-2 (docs/models.md)."""

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that no model has."""
        for name in NAMES:
            size, most = getattr(self, name), MOST_LAYERS if name == "n_layer" else LARGEST_SIZE
            if type(size) is not int or not 1 <= size <= most:
                raise ValueError(f"{name}={size!s:.80} must be a whole number from 1 to {most}")
        if self.activation_function not in ACTIVATIONS:
            known = " or ".join(ACTIVATIONS)
            raise ValueError(f"activation_function={self.activation_function} must be {known}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}")

    @property
    def in_transformers(self) -> bool:
        return self.family == GPT2

    def build(self) -> GPT:
        return GPT(self)

    def config_json(self, end_of_text: int | None = None) -> dict[str, Any]:
        # Another family names no class of transformers, which then refuses to load it.
        described = {"architectures": ["GPT2LMHeadModel"]} if self.in_transformers else {}
        return {
            **described,
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "n_positions": self.block_size,
            "n_ctx": self.block_size,
            "n_embd": self.n_embd,
            "n_layer": self.n_layer,
            "n_head": self.n_head,
            "n_inner": None,
            "activation_function": self.activation_function,
            "embd_pdrop": self.dropout,
            "attn_pdrop": self.dropout,
            "resid_pdrop": self.dropout,
            "layer_norm_epsilon": 1e-5,
            "initializer_range": 0.02,
            "scale_attn_weights": True,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": end_of_text,
            "use_cache": True,
            "dtype": "float32",
            "torch_dtype": "float32",  # as transformers 4 reads it
        }

    @classmethod
    def read(cls, content: dict[str, Any], dropout: float = 0.0) -> Self | None:
        width, inner = content.get("n_embd"), content.get("n_inner")
        activation = content.get("activation_function", "gelu_new")
        is_computed = all(content.get(key, value) == value for key, value in COMPUTED.items())
        is_wide = inner is None or (isinstance(width, int) and inner == 4 * width)
        is_gpt2 = content.get("model_type") == cls.family and activation in tuple(ACTIVATIONS)
        if not (is_gpt2 and is_computed and is_wide):
            return None
        sizes: dict[str, Any] = {ours: content.get(theirs) for ours, theirs in NAMES.items()}
        try:
            return cls(**sizes, dropout=dropout, activation_function=activation)
        except ValueError as error:
            raise ModelError(f"has sizes that no model has: {error}") from error

    def tensors(self) -> dict[str, Shape]:
        """Names and shapes of GPT-2's tensors of these sizes, as files hold them."""
        width = self.n_embd
        found: dict[str, Shape] = {
            "transformer.wte.weight": (self.vocab_size, width),
            "transformer.wpe.weight": (self.block_size, width),
        }
        for i in range(self.n_layer):
            for name, (inputs, outputs) in MATRICES.items():
                found[f"transformer.h.{i}.{name}.weight"] = (inputs * width, outputs * width)
                found[f"transformer.h.{i}.{name}.bias"] = (outputs * width,)
        norms = [f"h.{i}.{name}" for i in range(self.n_layer) for name in ("ln_1", "ln_2")]
        for name in [*norms, "ln_f"]:
            found |= {f"transformer.{name}.{kind}": (width,) for kind in ("weight", "bias")}
        return found


class GPT(LanguageModel):
    """The language model: logits for the next token at every position, or their loss."""

    config: GPTConfig
    _no_split_modules = ("Block",)
    can_share_context = True
    joined: ClassVar = {"c_attn": 3}  # query, key and value
    tensor_plan: ClassVar = {
        "transformer.h.*.attn.c_attn": "colwise",
        "transformer.h.*.attn.c_proj": "rowwise",
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
    }

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        self.lm_head = Head(config.n_embd, config.vocab_size, bias=False)
        self.tie_weights()
        self.apply(self.initialise)

    def initialise(self, module: nn.Module) -> None:
        """GPT-2's: N(0, 0.02), biases 0; projections onto the residual stream times 1/sqrt(2L)."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Attention | MLP):  # visited after its children
            nn.init.normal_(module.c_proj.weight, std=0.02 / math.sqrt(2 * self.config.n_layer))

    @property
    def blocks(self) -> nn.ModuleList:
        """The transformer blocks, in order."""
        return self.transformer.h

    def layout(self) -> Layout:
        transposed = tuple(f"{name}.weight" for name in MATRICES)
        # OpenAI's own files have no prefix, and a mask as a constant.
        return Layout(self, transposed, "transformer.", (".attn.bias", ".attn.masked_bias"))

    def refuse_undescribed(self) -> None:
        has = {name: shape for one in self.layout().written() for name, shape in one.shapes.items()}
        expected = self.config.tensors()
        for name in [*expected, *has] if self.config.in_transformers else []:
            if has.get(name) != expected.get(name):
                found = f"has {name} {[*has[name]]}" if name in has else f"has no {name}"
                raise ModelError(
                    f"model/gpt.py {found}, unlike transformers' GPT2LMHeadModel, which would load "
                    "another model from each snapshot. Give a changed model a name of its own: "
                    "GPTConfig.family in model/gpt.py"
                )

    def tie_weights(self) -> None:
        """Make the output layer and the token embedding one tensor."""
        self.lm_head.weight = self.transformer.wte.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.wte

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def new_cache(self) -> KeyValueCache:
        return KeyValueCache(self.config.n_layer)

    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """As `LanguageModel.forward`: any number of ids into an empty cache, later one at a time.

        Raises ValueError if the positions exceed `block_size`.
        """
        past = 0 if cache is None else cache.length
        time = ids.size(1)
        if past + time > self.config.block_size:
            raise ValueError(f"{past + time} positions, but block_size={self.config.block_size}")
        assert past == 0 or time == 1, "a filled cache is extended by one position at a time"
        rows = self.rows_at(positions)
        if positions is None:
            positions = torch.arange(past, past + time, device=ids.device)
        hidden = self.transformer(ids, positions, rows, cache)  # (B, T, C)
        return self.lm_head(hidden, targets)
