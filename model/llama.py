"""A Llama (Touvron et al., 2023) with tied embeddings, in plain torch modules.

Beside GPT-2 it has rotary positions (Su et al., 2021), RMSNorm, SwiGLU and no biases, and several
heads of queries may share one of keys and values (Ainslie et al., 2023).

Letters in shapes: B batch, T time (positions), C channels (n_embd), H heads, K heads of keys and
values, D = C / H, V vocabulary. Module names are those of transformers' Llama.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import Attend
from model.documents import Rows
from model.family import (
    KeyValueCache,
    LanguageModel,
    ModelConfig,
    check_sizes,
    read_sizes,
)
from model.head import Head
from model.layout import ModelError, Shape
from model.recompute import around_block, within_block

LLAMA = "llama"
"""transformers' name of Llama."""
NAMES = {
    "vocab_size": "vocab_size",
    "block_size": "max_position_embeddings",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "n_kv_head": "num_key_value_heads",
}
"""Our names of the sizes, and those of config.json."""
THETA = 10_000.0
"""The base of the rotations' frequencies."""
EPSILON = 1e-5
INNER_MULTIPLE = 64
"""The inner width of the SwiGLU is a multiple: matrices of other sizes are slower."""


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm of float32 numbers (see `model.gpt.LayerNorm`)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.float(), self.eps)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.dropout = config.dropout
        self.size = config.n_embd // config.n_head
        self.shared = config.n_head // config.kv_heads
        width = self.size * config.kv_heads
        self.q_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.k_proj = nn.Linear(config.n_embd, width, bias=False)
        self.v_proj = nn.Linear(config.n_embd, width, bias=False)
        self.o_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.attend = Attend()

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        rows: Rows | None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        batch, time, _ = x.shape
        query, key, value = (
            project(x).view(batch, time, -1, self.size).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )  # (B, H, T, D), and twice (B, K, T, D)
        query, key = (rotated(part, *rotation).to(value.dtype) for part in (query, key))
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        if self.shared > 1:
            key, value = (part.repeat_interleave(self.shared, dim=1) for part in (key, value))
        dropout = self.dropout if self.training else 0.0
        if rows is not None:
            mixed = self.attend(query, key, value, rows=rows, dropout_p=dropout)
        else:  # as in model.gpt.Attention
            mixed = self.attend(query, key, value, dropout_p=dropout, is_causal=time > 1)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, time, -1))


def rotations(positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles of positions (..., T), each (..., T, D)."""
    dimensions = torch.arange(0, size, 2, device=positions.device).float()
    frequencies = 1.0 / THETA ** (dimensions / size)  # (D / 2,)
    angles = positions[..., None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Queries or keys (B, H, T, D): number i and number i + D / 2 are turned as one point."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2020)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.n_embd, config.inner, bias=False)
        self.up_proj = nn.Linear(config.n_embd, config.inner, bias=False)
        self.down_proj = nn.Linear(config.inner, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.n_embd, EPSILON)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.n_embd, EPSILON)
        self.mlp = MLP(config)
        self.recompute = within_block(config.activation_checkpointing)

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        rows: Rows | None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        if self.recompute is not None and self.training and cache is None:
            return self.recompute(self._compute, x, rotation, rows)
        return self._compute(x, rotation, rows, cache)

    def _compute(self, x: Tensor, *context: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *context)
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    """Embedding, blocks and the final norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, EPSILON)
        self.size = config.n_embd // config.n_head
        self.recompute = around_block(config.activation_checkpointing)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        rows: Rows | None,
        cache: KeyValueCache | None,
    ) -> Tensor:
        """Token ids (B, T) at positions (T) or (B, T) to (B, T, C)."""
        cosine, sine = rotations(positions, self.size)
        if positions.dim() == 2:  # for all heads
            cosine, sine = cosine[:, None], sine[:, None]
        x = self.embed_tokens(ids).float()  # as in `model.gpt.Transformer`
        for block in self.layers:
            if self.recompute is not None and self.training and cache is None:
                x = self.recompute(block, x, (cosine, sine), rows)
            else:
                x = block(x, (cosine, sine), rows, cache)
        return self.norm(x)


@dataclass(frozen=True)
class LlamaConfig(ModelConfig):
    """The sizes of a Llama, and what transformers needs to know to compute the same."""

    n_kv_head: int | None = None
    """Heads of keys and values, each for as many heads of queries; None: n_head."""

    family = LLAMA
    """A model that computes something else than Llama needs another name (docs/models.md)."""

    def __post_init__(self) -> None:
        check_sizes(**{name: getattr(self, name) for name in NAMES if name != "n_kv_head"})
        check_sizes(n_kv_head=self.kv_heads)
        if self.n_embd % (2 * self.n_head):
            raise ValueError(
                f"n_embd={self.n_embd} is not a multiple of 2 * n_head={2 * self.n_head}, which "
                "rotary positions need"
            )
        if self.n_head % self.kv_heads:
            raise ValueError(f"n_head={self.n_head} is not a multiple of n_kv_head={self.kv_heads}")

    @property
    def kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def head_counts(self) -> tuple[int, ...]:
        return self.n_head, self.kv_heads

    @property
    def inner(self) -> int:
        """Channels in the SwiGLU: its three matrices have as many weights as the two of GPT-2."""
        return math.ceil(8 * self.n_embd / 3 / INNER_MULTIPLE) * INNER_MULTIPLE

    @property
    def in_transformers(self) -> bool:
        return self.family == LLAMA

    def build(self) -> Llama:
        return Llama(self)

    def config_json(self, end_of_text: int | None = None) -> dict[str, Any]:
        described = {"architectures": ["LlamaForCausalLM"]} if self.in_transformers else {}
        return {
            **described,
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.block_size,
            "num_hidden_layers": self.n_layer,
            "num_attention_heads": self.n_head,
            "num_key_value_heads": self.kv_heads,
            "hidden_size": self.n_embd,
            "intermediate_size": self.inner,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": self.dropout,
            "rms_norm_eps": EPSILON,
            "rope_theta": THETA,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": end_of_text,
            "use_cache": True,
            "dtype": "float32",
        }

    @classmethod
    def read(
        cls,
        content: dict[str, Any],
        dropout: float = 0.0,
        activation_checkpointing: bool | str = False,
    ) -> Self | None:
        """The sizes, if `config_json` has written it; None for any other.

        transformers' module trains the Llamas of others, as it did before there was this one.
        """
        template = cls(1, 1, 1, 1, 2).config_json()
        if content.get("model_type") != cls.family or content.keys() != template.keys():
            return None
        sizes = read_sizes(content, NAMES)
        if sizes["n_embd"] % (2 * sizes["n_head"]) or sizes["n_head"] % sizes["n_kv_head"]:
            raise ModelError("has numbers of heads that do not divide each other")
        found = cls(**sizes, dropout=content["attention_dropout"])
        if found.config_json(content["eos_token_id"]) != content:
            return None
        return replace(found, dropout=dropout, activation_checkpointing=activation_checkpointing)

    def tensors_in_transformers(self) -> dict[str, Shape] | None:
        if not self.in_transformers:
            return None
        width, inner = self.n_embd, self.inner
        shared = width // self.n_head * self.kv_heads
        block: dict[str, Shape] = {
            "self_attn.q_proj": (width, width),
            "self_attn.k_proj": (shared, width),
            "self_attn.v_proj": (shared, width),
            "self_attn.o_proj": (width, width),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }
        layers = range(self.n_layer)
        return {
            "model.embed_tokens.weight": (self.vocab_size, width),
            **{
                f"model.layers.{i}.{name}.weight": one
                for i in layers
                for name, one in block.items()
            },
            "model.norm.weight": (width,),
        }


class Llama(LanguageModel):
    """The language model: logits for the next token at every position, or their loss."""

    config: LlamaConfig
    _no_split_modules = ("Block",)
    tensor_plan: ClassVar = {
        "model.embed_tokens": "embedding",
        "model.layers.*.self_attn": "entry",
        "model.layers.*.self_attn.[qkv]_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp": "entry",
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
        "lm_head": "head",
    }

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Transformer(config)
        self.lm_head = Head(config.n_embd, config.vocab_size, bias=False)
        self.tie_weights()
        for name, weight in self.named_parameters():
            if weight.dim() == 2:  # as GPT-2's: smaller for projections onto the residual stream
                onto = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * config.n_layer if onto else 1))

    @property
    def can_share_context(self) -> bool:
        return True

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.layers

    def tie_weights(self) -> None:
        self.lm_head.weight = self.model.embed_tokens.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

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
        return self.lm_head(self.model(ids, positions, rows, cache), targets)
