"""What the project asks of a family of models.

A family is two classes in one file: `ModelConfig`, the sizes of a model and all that follows from
them, and `LanguageModel`, the module. model/gpt.py is an example; model/families.py lists them.

Letters in shapes: B batch, H heads, T time (positions), D channels of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, cast

from torch import Tensor, nn

from model.attention import Rows, rows_of
from model.context import Context
from model.frozen import full_parameters
from model.head import Head
from model.layout import Layout
from model.lora import Lora
from model.tensor import Plan, share_matrices


@dataclass(frozen=True)
class ModelConfig(ABC):
    """The sizes of a model, and what its family says of them. Sizes are counts."""

    vocab_size: int
    """Rows of the embedding: at least as many as the tokenizer has tokens."""
    block_size: int
    """The longest context."""
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float = 0.0
    """A probability."""
    activation_checkpointing: bool = False
    """Whether a backward pass computes blocks again, from their inputs."""
    lora: Lora | None = None
    n_kv_head: int | None = None
    """The heads of keys and values, where they may be fewer than those of queries."""
    head_size: int | None = None
    """Channels of a head, where they may be others than n_embd / n_head."""
    can_pack: bool = True
    """Whether documents in a row do not attend to each other if positions begin again."""

    @property
    @abstractmethod
    def family(self) -> str:
        """The model_type in config.json."""

    @property
    def in_transformers(self) -> bool:
        """Whether transformers has a class for what config.json describes."""
        return True

    @classmethod
    @abstractmethod
    def read(cls, content: dict[str, Any], dropout: float = 0.0) -> Self | None:
        """The sizes in a config.json, which is untrusted; None if it is of another family.

        Raises ModelError for a model of this family that cannot be built here.
        """

    @abstractmethod
    def build(self) -> LanguageModel:
        """A model with random weights and without adapters, on torch's default device.

        Raises ModelError for sizes that contradict each other.
        """

    @abstractmethod
    def config_json(self, end_of_text: int | None = None) -> dict[str, Any]:
        """The config.json of a snapshot, as transformers reads it.

        transformers ends a text at `end_of_text`, unless the model came with ends of its own.
        """

    def with_layers(self, n_layer: int) -> Self:
        """The same model with another number of layers."""
        return replace(self, n_layer=n_layer)


class LanguageModel(nn.Module, ABC):
    """A model that predicts the next token at every position."""

    config: ModelConfig
    _no_split_modules: tuple[str, ...]
    """The classes of its blocks, which FSDP wraps if the accelerate config file names none."""
    joined: ClassVar[Mapping[str, int]] = {}
    """Linear layers of the blocks whose weight joins several matrices by rows, and how many.

    Muon orthogonalizes each of them. A weight whose rows are interleaved counts as one matrix.
    """

    can_share_context: bool = False
    """Whether its attention is that of `rows_at`, so that processes can share a sequence."""
    context: Context | None = None
    """The processes that share each sequence, if several do."""

    @property
    def tensor_plan(self) -> Plan:
        """How processes share its matrices (`model.tensor`); empty if they cannot."""
        return {}

    def rows_at(self, positions: Tensor | None) -> Rows | None:
        """What tokens at positions (B, T) attend to; None for all earlier ones of their row."""
        if self.context is not None and self.context.rows is not None:
            return self.context.rows
        return None if positions is None else rows_of(positions)

    @property
    @abstractmethod
    def blocks(self) -> nn.ModuleList:
        """The transformer blocks, in order."""

    @property
    def named(self) -> nn.Module:
        """The module whose parameters have the names of `layout`; adapters are added to it."""
        return self

    def layout(self) -> Layout:
        """How the parameters lie in files."""
        return Layout(self)

    def refuse_undescribed(self) -> None:
        """Raise ModelError where the config.json of a snapshot would describe another model."""

    @abstractmethod
    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Logits (B, T, V) for token ids (B, T), or, with targets (B, T), the mean loss in nats.

        Targets of `model.head.IGNORED` do not count. With `positions` (B, T), a document begins
        wherever they do not count on, and attends to itself alone; only a model that `can_pack`
        gets them. With a cache of `new_cache`, `ids` are the positions after the cached ones.
        In training the loss may have more parts than that of the targets.
        """

    def initialise(self, module: nn.Module) -> None:
        """Draw what a new model begins with, of one module's own parameters or its children's.

        Children come first. What has no value afterwards gets torch's.
        """

    # Without these three methods accelerate's FSDP2 does not see a tie, and trains wrongly.
    @abstractmethod
    def tie_weights(self) -> None:
        """Make the output layer and the token embedding one tensor, if the family does."""

    @abstractmethod
    def get_input_embeddings(self) -> nn.Module: ...

    @abstractmethod
    def get_output_embeddings(self) -> nn.Module: ...

    @abstractmethod
    def new_cache(self) -> Any:
        """An empty cache for `forward`."""

    def share_context(self, context: Context) -> None:
        """Compute the loss as `Context.around` says. Call it before the model is wrapped."""
        self.context = context
        self.forward = context.around(self.forward)  # type: ignore[method-assign]

    def share_matrices(self, mesh: Any) -> None:
        """Keep this process's parts of the matrices, on a mesh of one dimension.

        Call it before the model is wrapped, and before `share_context`.
        """
        share_matrices(self, self.tensor_plan, self.joined, mesh)
        if isinstance(output := self.get_output_embeddings(), Head):
            output.mesh = mesh

    def matrices(self) -> dict[nn.Parameter, int]:
        """The weights of the linear layers in the blocks, and how many matrices each one joins.

        Embeddings and the output layer are not among them, nor are stacked experts.
        """
        return {
            cast(nn.Parameter, layer.weight): self.joined.get(name.rpartition(".")[2], 1)
            for name, layer in self.blocks.named_modules()
            if isinstance(layer, nn.Linear)
        }

    def flops_per_token(self, block_size: int) -> float | None:
        """FLOP of a forward and a backward pass for a token: 6N + 12LTC; None if unknown.

        N excludes embeddings that are looked up and not multiplied. A frozen parameter has 4
        instead of 6: no gradient is computed for it. Attention is counted as if every position saw
        all others.
        """
        output = self.get_output_embeddings().weight
        looked_up = {
            id(module.weight)
            for module in self.modules()
            if isinstance(module, nn.Embedding) and module.weight is not output
        }
        matrices = 0
        for _, parameter in full_parameters(self):
            if id(parameter) not in looked_up:
                matrices += parameter.numel() * (6 if parameter.requires_grad else 4)
        sizes = self.config
        width = sizes.n_embd if sizes.head_size is None else sizes.n_head * sizes.head_size
        return matrices + 12 * sizes.n_layer * width * block_size


def parameter_count(model: nn.Module) -> int:
    """The number of trained parameters; tied weights count once."""
    return sum(parameter.numel() for _, parameter in full_parameters(model))
