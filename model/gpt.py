"""GPT-2 as published (Radford et al., 2019), in plain torch modules.

Letters in shapes: B batch, T time (positions), C channels (n_embd), H heads, D = C / H, V
vocabulary.

Module names are GPT-2's, so that parameters have the same names in a snapshot. Layers are plain
`nn.Linear`; `snapshot` converts to the transposed layout of GPT-2's files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.head import Head
from model.lora import Lora

ACTIVATIONS = {"gelu_new": "tanh", "gelu": "none"}
"""By transformers' name, torch's `approximate`: GPT-2's tanh approximation, and the exact GELU."""

GPT2 = "gpt2"
"""transformers' name of GPT-2."""


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model. Sizes are counts; `dropout` is a probability.

    `activation_function` is one of `ACTIVATIONS`.
    """

    vocab_size: int
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float = 0.0
    activation_checkpointing: bool = False
    activation_function: str = "gelu_new"
    lora: Lora | None = None
    family: ClassVar[str] = GPT2
    """The model_type in config.json. A model that computes something else than GPT-2 needs another
    name, or transformers would load its snapshots as GPT-2 (docs/models.md)."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.activation_function not in ACTIVATIONS:
            known = " or ".join(ACTIVATIONS)
            raise ValueError(f"activation_function={self.activation_function} must be {known}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}")

    @property
    def in_transformers(self) -> bool:
        """Whether transformers has a class for what config.json describes."""
        return self.family == GPT2


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
    """nn.LayerNorm, computed in the precision of its input.

    Under FSDP in mixed precision the weights have 16 bits, and the residual stream has 32.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Attention(nn.Module):
    """Causal self-attention: each position attends to itself and to earlier ones."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        batch, time, channels = x.shape
        query, key, value = (
            part.view(batch, time, self.n_head, channels // self.n_head).transpose(1, 2)
            for part in self.c_attn(x).split(channels, dim=2)
        )  # each (B, H, T, D)
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        # A single new position attends to all cached ones. Several positions need the causal mask,
        # which is correct only for an empty cache; GPT.forward ensures that.
        dropout = self.dropout if self.training else 0.0
        mixed = self.attend(query, key, value, dropout_p=dropout, is_causal=time > 1)
        mixed = mixed.transpose(1, 2).reshape(batch, time, channels)  # (B, H, T, D) -> (B, T, C)
        return self.resid_dropout(self.c_proj(mixed))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """torch's attention; model/cpu/attention.py has a faster one, with the same arguments.

        To attend otherwise, change the call above: a CPU does not execute this function.
        """
        return F.scaled_dot_product_attention(query, key, value, **options)


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

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache)
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
        self.activation_checkpointing = config.activation_checkpointing

    def forward(self, ids: Tensor, past: int, cache: KeyValueCache | None) -> Tensor:
        """Token ids (B, T), after `past` earlier positions, to (B, T, C)."""
        positions = torch.arange(past, past + ids.size(1), device=ids.device)
        # The residual stream is float32 even if FSDP's weights have 16 bits.
        x = self.drop((self.wte(ids) + self.wpe(positions)).float())
        for block in self.h:
            if self.activation_checkpointing and self.training and cache is None:
                # Restores the generator's state, so that the recomputed dropout is the same.
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x, cache)
        return self.ln_f(x)


class GPT(nn.Module):
    """The language model: logits for the next token at every position, or their loss."""

    _no_split_modules = ("Block",)
    """The class that FSDP wraps if the accelerate config file names none."""
    can_pack = False  # a row is one document: its attention is over all earlier positions

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        self.lm_head = Head(config.n_embd, config.vocab_size, bias=False)
        self.tie_weights()
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
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

    def new_cache(self) -> KeyValueCache:
        return KeyValueCache(self.config.n_layer)

    # Without these three methods accelerate's FSDP2 does not see the tie, and trains wrongly.
    def tie_weights(self) -> None:
        """Make the output layer and the token embedding one tensor."""
        self.lm_head.weight = self.transformer.wte.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.wte

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self, ids: Tensor, targets: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Logits (B, T, V) for token ids (B, T), or, with targets (B, T), the mean loss in nats.

        Targets equal to `IGNORED` do not count. With a cache, `ids` are the positions after the
        cached ones: any number into an empty cache, later one at a time.

        Raises ValueError if the positions exceed `block_size`.
        """
        past = 0 if cache is None else cache.length
        time = ids.size(1)
        if past + time > self.config.block_size:
            raise ValueError(f"{past + time} positions, but block_size={self.config.block_size}")
        assert past == 0 or time == 1, "a filled cache is extended by one position at a time"
        hidden = self.transformer(ids, past, cache)  # (B, T, C)
        return self.lm_head(hidden, targets)


def parameter_count(model: nn.Module) -> int:
    """The number of trained parameters; tied weights count once."""
    return sum(parameter.numel() for parameter in model.parameters())
