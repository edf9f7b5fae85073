"""A causal language model of transformers, with the interface of `GPT`.

transformers builds the module from the content of a config.json; it is imported only then. Nothing
in a config.json chooses code: not the attention, not a class outside transformers.

Letters in shapes: B batch, T time (positions), V vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from model.dropout_places import with_dropout
from model.experts import IN_AUTOCAST, in_autocast
from model.gpt import GPT, GPTConfig
from model.head import mean_loss
from model.lora import INSTALL, Lora, add_adapters

CODE_KEYS = ("auto_map", "trust_remote_code", "custom_pipelines")
"""Entries of a config.json that ask for code from a repo. transformers itself passes over them, and
so does this file, where it has the model."""
QUANTIZED = "quantization_config"
UNUSED_KEYS = ("attn_implementation", "experts_implementation", "transformers_version")
"""Entries that choose a kernel, perhaps from the Hub, or only inform. They are left out."""
LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers")
"""What the number of layers is called in a config.json."""
PACKING = (
    *("gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "olmo2"),
    *("phi3", "qwen2", "qwen3", "smollm3"),
)
"""Families whose attention ends where positions begin again (measured by test_rows.py)."""
GROWING_ROTATIONS = ("dynamic", "longrope")
"""Rotary embeddings that depend on the largest position of a batch."""
GROUPED = "grouped_mm"
"""How transformers computes all experts of a layer at once, where an architecture can."""
UNBOUNDED = 1 << 20
"""The context length of an architecture that has no longest one."""


class UnknownArchitecture(ValueError):
    """A config.json that no causal language model here can be built from: a sentence."""


@dataclass(frozen=True)
class CausalLMConfig:
    """A config.json, and the sizes in it that this project needs. Sizes are counts."""

    content: dict[str, Any] = field(repr=False, hash=False)
    """The entries of config.json, with `dropout` at every place that has one."""
    family: str
    """transformers' name of the architecture, such as llama."""
    vocab_size: int
    """Rows of the embedding: at least as many as the tokenizer has tokens."""
    block_size: int
    """The longest context."""
    n_layer: int
    n_head: int
    n_embd: int
    head_size: int
    activation_checkpointing: bool = False
    lora: Lora | None = None
    in_transformers: ClassVar[bool] = True


def causal_lm_config(
    content: dict[str, Any], dropout: float = 0.0, activation_checkpointing: bool = False
) -> CausalLMConfig:
    """The configuration of the model that a config.json describes.

    Raises UnknownArchitecture if it is not a causal language model of transformers, needs code from
    a repo, or is quantized, and if transformers is not installed.
    """
    if content.get(QUANTIZED):
        raise UnknownArchitecture(
            "its weights are quantized, and only float32, bf16 and fp16 weights can be trained"
        )
    used = {
        key: value
        for key, value in content.items()
        if key not in (*UNUSED_KEYS, *CODE_KEYS) and not key.startswith("_")
    }
    used["dtype"] = "float32"
    used.pop("torch_dtype", None)
    try:
        built = _transformers_config(used)
    except UnknownArchitecture as error:
        for key in CODE_KEYS:
            if content.get(key):
                raise UnknownArchitecture(
                    f"it needs code from its repo ({key}), which is never executed"
                ) from error
        raise
    used = with_dropout(used, built.to_dict(), dropout)
    built = _transformers_config(used)
    sizes = built.get_text_config()
    if getattr(sizes, "is_heterogeneous", False):
        raise UnknownArchitecture("its layers differ in size, which is not supported")
    heads = int(getattr(sizes, "num_attention_heads", 0) or 0)
    return CausalLMConfig(
        content=used,
        family=str(built.model_type),
        vocab_size=int(sizes.vocab_size),
        block_size=int(getattr(sizes, "max_position_embeddings", None) or UNBOUNDED),
        n_layer=int(sizes.num_hidden_layers),
        n_head=heads,
        n_embd=int(sizes.hidden_size),
        head_size=int(getattr(sizes, "head_dim", None) or sizes.hidden_size // max(1, heads)),
        activation_checkpointing=activation_checkpointing,
    )


def with_layers(config: ModelConfig, n_layer: int) -> ModelConfig:
    """The same model with another number of layers; lists with an entry for each follow."""
    if isinstance(config, GPTConfig):
        return replace(config, n_layer=n_layer)
    content: dict[str, Any] = {}
    for key, value in config.content.items():
        is_list = isinstance(value, list) and len(value) == config.n_layer
        if key in LAYER_KEYS:
            content[key] = n_layer
        elif is_list:
            content[key] = [value[i % config.n_layer] for i in range(n_layer)]
        else:
            content[key] = value
    return replace(config, content=content, n_layer=n_layer)


def quiet_transformers() -> None:
    """Keep transformers' own messages and progress bars out of a command's output."""
    if find_spec("transformers") is not None:
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()


def _transformers_config(content: dict[str, Any]) -> Any:
    """transformers' configuration object. Raises UnknownArchitecture."""
    if find_spec("transformers") is None:
        raise UnknownArchitecture(f"it needs transformers, which is not installed. {INSTALL}")
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    family = content.get("model_type")
    if not isinstance(family, str) or family not in CONFIG_MAPPING:
        raise UnknownArchitecture(
            f"the installed transformers does not know its model_type {family!r:.80}"
        )
    wanted = content.get("architectures") or [NAMES.get(family)]
    if family not in NAMES or wanted != [NAMES[family]] or "vision_config" in content:
        raise UnknownArchitecture(
            f"it is not a causal language model of text, but {family} ({wanted!s:.80})"
        )
    try:
        return CONFIG_MAPPING[family](**content)
    except Exception as error:  # the validation of each architecture raises its own types
        raise UnknownArchitecture(f"transformers refuses it: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


class CausalLM(nn.Module):
    """A module of transformers. Parameters have its names, with `lm.` before them."""

    def __init__(self, config: CausalLMConfig) -> None:
        """Build the module with transformers' random weights, on torch's default device.

        Raises UnknownArchitecture for sizes that contradict each other.
        """
        super().__init__()
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

        self.config = config
        built = _transformers_config(config.content)
        has_sdpa = getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(built)], "_supports_sdpa", False)
        attention = "sdpa" if has_sdpa else "eager"  # never a kernel that a config names
        try:
            self.lm = AutoModelForCausalLM.from_config(built, attn_implementation=attention)
            if config.activation_checkpointing:
                # Restores the generator's state, so that the recomputed dropout is the same.
                self.lm.activation_checkpointing_enable({"use_reentrant": False})
        except (KeyboardInterrupt, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # each architecture raises its own types
            raise UnknownArchitecture(
                f"transformers cannot build it: {_first_line(error)}"
            ) from error
        if getattr(self.lm.config, "_experts_implementation", None) == GROUPED:
            from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as FORWARDS

            FORWARDS.register(IN_AUTOCAST, in_autocast(FORWARDS[GROUPED]))
            self.lm.set_experts_implementation(IN_AUTOCAST)
        self._no_split_modules = tuple(self.lm._no_split_modules or ())
        """The classes that FSDP wraps if the accelerate config file names none."""
        # The residual stream is float32 even if FSDP's weights have 16 bits, as in `GPT`.
        self.lm.get_input_embeddings().register_forward_hook(lambda _, __, output: output.float())

    @property
    def blocks(self) -> nn.ModuleList:
        """The transformer blocks, in order."""
        body = self.lm.base_model
        for parts in (body.children(), body.modules()):  # some have a decoder in between
            if lists := [one for one in parts if isinstance(one, nn.ModuleList)]:
                return max(lists, key=len)
        return nn.ModuleList()

    # accelerate's FSDP2 needs these to recognise tied weights and the final norm.
    @property
    def base_model_prefix(self) -> str:
        return "base"

    @property
    def base(self) -> nn.Module:
        """The model without its output layer."""
        body: nn.Module = self.lm.base_model
        return body

    def tie_weights(self) -> None:
        """Make the output layer and the token embedding one tensor, if the architecture does."""
        self.lm.tie_weights()

    def get_input_embeddings(self) -> nn.Module:
        found: nn.Module = self.lm.get_input_embeddings()
        return found

    def get_output_embeddings(self) -> nn.Module:
        found: nn.Module = self.lm.get_output_embeddings()
        return found

    @property
    def can_pack(self) -> bool:
        """Whether several documents in a row do not attend to each other if positions say so.

        transformers derives the mask from the positions, but not in every architecture. What a
        document is computed to must not depend on its neighbours in the batch either.
        """
        rotations = json.dumps(self.lm.config.to_dict(), default=str)
        grows = any(f'"{one}"' in rotations for one in GROWING_ROTATIONS)
        return self.config.family in PACKING and not grows

    def new_cache(self) -> Any:
        """An empty cache for `forward`."""
        from transformers import DynamicCache

        return DynamicCache(config=self.lm.config)

    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Logits (B, T, V) for token ids (B, T), or, with targets (B, T), the mean loss in nats.

        Targets of `model.head.IGNORED` do not count. With `positions` (B, T), a document begins
        wherever they do not count on, and attends to itself alone (see `can_pack`). With a cache,
        `ids` are the positions after the cached ones.
        """
        found = self.lm(
            input_ids=ids, position_ids=positions, cache=cache, use_cache=cache is not None
        )
        logits: Tensor = found.logits
        if targets is None:
            return logits
        return mean_loss(logits.flatten(0, 1), targets.flatten())


LanguageModel = GPT | CausalLM
"""What the loop trains."""
ModelConfig = GPTConfig | CausalLMConfig
"""The sizes of either, by the same names."""


def build_model(config: ModelConfig) -> LanguageModel:
    """A model with random weights, on torch's default device; with `config.lora`, with adapters.

    Raises UnknownArchitecture, and LoraError for adapters that it cannot have.
    """
    model = GPT(config) if isinstance(config, GPTConfig) else CausalLM(config)
    if config.lora is not None:
        adapt(model, config.lora)
    return model


def adapt(model: LanguageModel, lora: Lora) -> None:
    """Freeze a model, and add adapters to it (see `model.lora`)."""
    add_adapters(model if isinstance(model, GPT) else model.lm, model.blocks, lora)
