"""A causal language model of transformers, with the interface of `GPT`.

transformers builds the module from the content of a config.json; it is imported only then. Nothing
in a config.json chooses code: not the attention, not a class outside transformers.

Letters in shapes: B batch, T time (positions), V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from model.attention import Rows, attend
from model.balance import ENTRY as BALANCED
from model.balance import adds_balance, balancing_loss, refuse_unknown_loss
from model.family import LanguageModel, ModelConfig
from model.frozen import compute_dtype
from model.head import Head, mean_loss
from model.layout import Layout, ModelError
from model.lora import INSTALL, hidden
from model.older_config import with_older_entries
from model.tensor import REPLICATED, WAYS, Plan

NESTED = {"text_config", "vision_config"}
"""Entries of models that read more than text."""
CODE_KEYS = {"auto_map", "trust_remote_code", "custom_pipelines"}
CODE_KEYS |= {"attn_implementation", "experts_implementation"}  # kernels, perhaps of a repo
"""Entries of a config.json that ask for code from a repo. They are left out."""
LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers")
"""What the number of layers is called in a config.json."""
LARGEST_NUMBER = 2**31
MOST_MODULES = 20_000
COUNTS = ("layer", "expert")
"""Parts of the names of entries that count modules."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Entries of a mixture, in which a token uses a part of the parameters."""
PACKING = (
    *("gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "olmo2"),
    *("phi3", "qwen2", "qwen3", "smollm3"),
)
"""Families whose attention ends where positions begin again (measured by test_rows.py)."""
PLAIN_LOGITS = (
    *("gemma3_text", "glm", "gpt2", "gpt_neox", "granite", "helium", "llama", "mistral"),
    *("mixtral", "olmo2", "olmoe", "opt", "phi3", "qwen2", "qwen2_moe", "qwen3"),
    *("qwen3_moe", "smollm3", "stablelm", "starcoder2"),
)
"""Families whose logits are those of the output layer (measured by test_plain_logits.py)."""
CHANGES_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Entries by which an architecture caps or scales them."""
GROWING_ROTATIONS = ("dynamic", "longrope")
"""Rotary embeddings that depend on the largest position of a batch."""
IN_ROWS = "in_rows"
"""What transformers calls `attend_in_rows`."""
GROUPED, GROUPED_IN_AUTOCAST = "grouped_mm", "grouped_mm_in_autocast"
"""How transformers computes all experts of a layer at once, where an architecture can; and what it
calls `in_autocast` of that."""
DROPOUT = ("dropout", "pdrop", "dropout_prob", "dropout_p", "dropout_rate")
"""How the names of entries end that are probabilities of dropout."""
UNBOUNDED = 1 << 20
"""The context length of an architecture that has no longest one."""


@dataclass(frozen=True, kw_only=True)
class CausalLMConfig(ModelConfig):
    """A config.json, and the sizes in it that this project needs."""

    content: dict[str, Any] = field(repr=False, hash=False)
    """The entries of config.json, with `dropout` in each that is a probability of dropout."""

    @property
    def family(self) -> str:
        return str(self.content["model_type"])

    @classmethod
    def read(cls, content: dict[str, Any], dropout: float = 0.0) -> Self:
        """The configuration of the model that a config.json describes.

        Raises ModelError if it is not a causal language model of transformers, needs code from a
        repo, or is quantized, and if transformers is not installed.
        """
        for name, number in content.items():
            if not isinstance(number, int | float):
                continue
            most = MOST_MODULES if any(part in name for part in COUNTS) else LARGEST_NUMBER
            if not abs(number) <= most:  # nan compares as false
                raise ModelError(f"has {name}={number:g}, which no model has")
        if content.get("quantization_config"):
            raise unusable(
                "its weights are quantized, and only float32, bf16 and fp16 weights can be trained"
            )
        used = {
            key: value
            for key, value in content.items()
            if key not in {"transformers_version", *CODE_KEYS} and not key.startswith("_")
        }
        used["dtype"] = "float32"
        used.pop("torch_dtype", None)
        complete = _transformers_config(used).to_dict()
        # `complete` has the entries that config.json lacks, too: many defaults are above 0.
        probabilities = {
            key: value
            for key, value in complete.items()
            if key.endswith(DROPOUT) and type(value) in (int, float)
        }
        if dropout and not probabilities:
            raise unusable(f"model.dropout={dropout} has no effect, as it has none. Leave it out")
        used |= {key: dropout for key, value in probabilities.items() if value != dropout}
        sizes = _transformers_config(used).get_text_config()
        if getattr(sizes, "is_heterogeneous", False):
            raise unusable("its layers differ in size, which is not supported")
        heads = int(getattr(sizes, "num_attention_heads", 0) or 0)
        # transformers derives the mask from the positions, but not in every architecture. What a
        # document is computed to must not depend on its neighbours in the batch either.
        grows = any(f'"{one}"' in json.dumps(complete, default=str) for one in GROWING_ROTATIONS)
        return cls(
            content=used,
            vocab_size=int(sizes.vocab_size),
            block_size=int(getattr(sizes, "max_position_embeddings", None) or UNBOUNDED),
            n_layer=int(sizes.num_hidden_layers),
            n_head=heads,
            n_embd=int(sizes.hidden_size),
            n_kv_head=getattr(sizes, "num_key_value_heads", None),
            head_size=getattr(sizes, "head_dim", None),
            can_pack=used["model_type"] in PACKING and not grows,
            dropout=dropout,
        )

    def build(self) -> CausalLM:
        return CausalLM(self)

    def config_json(self, end_of_text: int | None = None) -> dict[str, Any]:
        return with_older_entries(self.content)

    def with_layers(self, n_layer: int) -> Self:
        """The same model with another number of layers; lists with an entry for each follow."""
        content: dict[str, Any] = {}
        for key, value in self.content.items():
            if key in LAYER_KEYS:
                content[key] = n_layer
            elif isinstance(value, list) and len(value) == self.n_layer:
                content[key] = [value[i % self.n_layer] for i in range(n_layer)]
            else:
                content[key] = value
        return replace(self, content=content, n_layer=n_layer)


def quiet_transformers() -> None:
    """Keep transformers' own messages and progress bars out of a command's output.

    It does not import torchao then, for quantized models that are refused anyway: half a second of
    every start, and a line for each of its kernels that does not load.
    """
    if find_spec("transformers") is not None:
        with hidden("torchao"):
            from transformers.utils import import_utils, logging

            import_utils.is_torchao_available()  # it remembers the answer
        logging.set_verbosity_error()
        logging.disable_progress_bar()


def _transformers_config(content: dict[str, Any]) -> Any:
    """transformers' configuration object. Raises ModelError."""
    if find_spec("transformers") is None:
        raise unusable(f"it needs transformers, which is not installed. {INSTALL}")
    quiet_transformers()
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    family = content.get("model_type")
    if not isinstance(family, str) or family not in CONFIG_MAPPING:
        raise unusable(
            f"the installed transformers does not know its model_type {family!r:.80}, and code of "
            "a repo is never executed"
        )
    wanted = content.get("architectures") or [NAMES.get(family)]
    if family not in NAMES or wanted != [NAMES[family]] or NESTED & content.keys():
        raise unusable(f"it is not a causal language model of text, but {family} ({wanted!s:.80})")
    try:
        return CONFIG_MAPPING[family](**content)
    except Exception as error:  # the validation of each architecture raises its own types
        raise unusable(f"transformers refuses it: {_first_line(error)}") from error


def unusable(reason: str) -> ModelError:
    return ModelError(f"cannot be used: {reason}")


def has_plain_logits(config: Any) -> bool:
    """Whether a model computes its logits by the output layer alone."""
    changed = any(getattr(config, one, None) not in (None, 1.0) for one in CHANGES_LOGITS)
    return config.model_type in PLAIN_LOGITS and not changed


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


class CausalLM(LanguageModel):
    """A module of transformers. Parameters have its names, with `lm.` before them."""

    config: CausalLMConfig
    base_model_prefix = "base"  # by which accelerate's FSDP2 finds the final norm

    def __init__(self, config: CausalLMConfig) -> None:
        """Build the module with transformers' random weights, on torch's default device.

        Raises ModelError for sizes that contradict each other.
        """
        super().__init__()
        from transformers import (
            MODEL_FOR_CAUSAL_LM_MAPPING,
            AttentionInterface,
            AttentionMaskInterface,
            AutoModelForCausalLM,
        )
        from transformers.masking_utils import sdpa_mask

        AttentionInterface.register(IN_ROWS, attend_in_rows)
        AttentionMaskInterface.register(IN_ROWS, sdpa_mask)
        self.config = config
        built = _transformers_config(config.content)
        has_sdpa = getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(built)], "_supports_sdpa", False)
        attention = "sdpa" if has_sdpa else "eager"  # never a kernel that a config names
        if has_sdpa and config.can_pack:
            attention = IN_ROWS
        try:
            self.lm = AutoModelForCausalLM.from_config(built, attn_implementation=attention)
            if config.activation_checkpointing:
                self.lm.activation_checkpointing_enable({"use_reentrant": False})
        except (KeyboardInterrupt, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # each architecture raises its own types
            raise unusable(f"transformers cannot build it: {_first_line(error)}") from error
        if getattr(self.lm.config, "_experts_implementation", None) == GROUPED:
            from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as FORWARDS

            FORWARDS.register(GROUPED_IN_AUTOCAST, in_autocast(FORWARDS[GROUPED]))
            self.lm.set_experts_implementation(GROUPED_IN_AUTOCAST)
            for module in self.lm.modules():
                if any(one.dim() == 3 for one in module.parameters(recurse=False)):
                    module.casts_weights = True
        self._no_split_modules = tuple(self.lm._no_split_modules or ())
        """The classes that FSDP wraps if the accelerate config file names none."""
        self.is_balanced = adds_balance(self.lm)
        """Whether the training loss has a mixture's load-balancing loss."""
        if self.is_balanced:  # `forward` asks for it where it trains
            setattr(self.lm.config, BALANCED, False)
        # A load-balancing loss is one of whole rows, and a sliding window needs another mask.
        has_window = getattr(self.lm.config, "sliding_window", None) is not None
        self.can_share_context = attention == IN_ROWS and not self.is_balanced and not has_window
        output = self.lm.get_output_embeddings()
        is_plain = type(output) is nn.Linear and output.bias is None
        if is_plain and has_plain_logits(self.lm.config):
            output.__class__ = Head
        # The residual stream is float32 even if FSDP's weights have 16 bits, as in `GPT`.
        self.lm.get_input_embeddings().register_forward_hook(lambda _, __, output: output.float())

    @property
    def named(self) -> nn.Module:
        return self.lm

    def initialise(self, module: nn.Module) -> None:
        """As transformers: `LanguageModel.initialise`."""
        self.lm._init_weights(module)

    def layout(self) -> Layout:
        from model.transformers_layout import TransformersLayout

        return TransformersLayout(self)

    def refuse_undescribed(self) -> None:
        """Raise ModelError for a model whose files hold more than parameters, as snapshots do.

        Of a buffer transformers would invent the values, and so would a run that resumes. Raises it
        also for a loss that transformers computes and this project does not.
        """
        parameters = {name for name, _ in self.lm.named_parameters(remove_duplicate=False)}
        if buffers := [name for name in self.lm.state_dict() if name not in parameters]:
            raise ModelError(
                f"the model {self.config.family} has values besides its parameters "
                f"({buffers[0]}), which snapshots do not hold. It cannot be trained here"
            )
        if self.is_balanced:
            refuse_unknown_loss(self.lm)

    @property
    def blocks(self) -> nn.ModuleList:
        """The transformer blocks, in order."""
        body = self.lm.base_model
        for parts in (body.children(), body.modules()):  # some have a decoder in between
            if lists := [one for one in parts if isinstance(one, nn.ModuleList)]:
                return max(lists, key=len)
        return nn.ModuleList()

    @property
    def base(self) -> nn.Module:
        """The model without its output layer."""
        return cast(nn.Module, self.lm.base_model)

    def tie_weights(self) -> None:
        """Make the output layer and the token embedding one tensor, if the architecture does."""
        self.lm.tie_weights()

    def get_input_embeddings(self) -> nn.Module:
        return cast(nn.Module, self.lm.get_input_embeddings())

    def get_output_embeddings(self) -> nn.Module:
        return cast(nn.Module, self.lm.get_output_embeddings())

    def new_cache(self) -> Any:
        """An empty cache for `forward`."""
        from transformers import DynamicCache

        return DynamicCache(config=self.lm.config)

    @property
    def tensor_plan(self) -> Plan:
        """transformers' own plan, of a family that tests measure; none if it has other words."""
        plan = {name: way for name, way in (self.lm._tp_plan or {}).items() if way != REPLICATED}
        plan.pop("lm_head", None)  # it is replicated, too
        is_known = self.config.family in PACKING and {*plan.values()} <= {*WAYS}
        return {f"lm.{name}": way for name, way in plan.items()} if is_known else {}

    def flops_per_token(self, block_size: int) -> float | None:
        if any(self.config.content.get(key) for key in EXPERTS):
            return None
        return super().flops_per_token(block_size)

    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """As `LanguageModel.forward`."""
        options: dict[str, Any] = {}
        # Where no processes share a sequence, transformers makes a mask of the positions itself.
        if (rows := self.rows_at(None)) is not None:
            # transformers takes a mask of four dimensions as it is, and makes none of (B, 1, T, T).
            options = {"packed_rows": rows, "attention_mask": ids.new_zeros(1, 1, 1, 1)}

        options |= {"input_ids": ids, "position_ids": positions}
        options |= {"cache": cache, "use_cache": cache is not None}
        if targets is None:
            return cast(Tensor, self.lm(**options).logits)
        output = self.get_output_embeddings()
        if not isinstance(output, Head):
            return mean_loss(self.lm(**options).logits.flatten(0, 1), targets.flatten())
        is_balanced = self.is_balanced and self.training
        if is_balanced:
            options["output_router_logits"] = True
        found = self.base(**options)
        loss: Tensor = output(found.last_hidden_state, targets)  # without all logits in memory
        if is_balanced:
            uneven = balancing_loss(self.lm, found.router_logits, targets)
            loss = loss + self.lm.router_aux_loss_coef * uneven
        return loss


def attend_in_rows(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed_rows: Rows | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention by torch, or within `packed_rows`.

    Queries (B, H, T, D) to (B, T, H, D).
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if packed_rows is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    assert options.get("sliding_window") is None, "can_share_context"
    dropout, scale = options.get("dropout", 0.0), options.get("scaling")
    mixed = attend(query, key, value, packed_rows, dropout, scale=scale)
    return mixed.transpose(1, 2).contiguous(), None


def in_autocast(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward pass of experts, with the products in autocast's dtype where it is enabled.

    transformers multiplies all experts of a layer with one operation, which torch's autocast does
    not know: in bf16 they would compute in float32, and most of a mixture's work is theirs. Frozen
    weights may have fewer bits than what they are multiplied with.
    """

    def compute(experts: Any, hidden: Tensor, *routing: Tensor) -> Tensor:
        dtype, weights = compute_dtype(hidden), dict(experts.named_parameters(recurse=False))
        if all(one.dtype == dtype for one in (hidden, *weights.values())):
            return forward(experts, hidden, *routing)
        cast = {name: one.to(dtype) for name, one in weights.items()}
        # This calls `compute` again, with weights of that dtype.
        output: Tensor = functional_call(experts, cast, (hidden.to(dtype), *routing))
        return output.to(hidden.dtype)

    return compute
