"""How the parameters of a model are named and laid out in the files of a snapshot.

Our GPT has GPT-2's names and transposed projections. A module of transformers has its own names in
memory; in files it has those of the Hub, which may split or join parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model.causal_lm import LanguageModel
from snapshot.errors import SnapshotError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Written:
    """Parameters that are converted and written at once; mostly one."""

    parameters: tuple[str, ...]
    shapes: dict[str, Shape]
    """By the names of the tensors in the file."""


@dataclass(frozen=True)
class Stored:
    """Where one parameter lies in files."""

    names: tuple[str, ...]
    transposed: bool = False
    convert: Callable[[Sequence[Tensor]], Tensor] | None = None
    """Makes the parameter of several tensors, in the order of `names`."""

    def shape_of(self, shapes: Mapping[str, Shape]) -> Shape:
        """The shape of the parameter, from the shapes of the tensors in the files."""
        if self.convert is None:
            (name,) = self.names
            return shapes[name][:: -1 if self.transposed else 1]
        stored = [torch.empty(shapes[name], device="meta") for name in self.names]
        return tuple(self.convert(stored).shape)


class Layout(ABC):
    """The layout of one model. Its parameters may be on any device, or sharded."""

    @abstractmethod
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by name, tied ones once. The optimizer's file has these names."""

    def trained(self) -> dict[str, nn.Parameter]:
        """Those of `parameters` that are trained."""
        return {name: one for name, one in self.parameters().items() if one.requires_grad}

    def is_transposed(self, name: str) -> bool:
        """Whether files hold this parameter, and so its moments, transposed."""
        return False

    @abstractmethod
    def written(self) -> list[Written]:
        """What is written, in the order of the file."""

    @abstractmethod
    def to_files(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors in the file, contiguous, of the full parameters of one `Written`."""

    @abstractmethod
    def find(self, shapes: Mapping[str, Shape]) -> dict[str, Stored]:
        """Where each parameter lies, in files with tensors of these names and shapes.

        Raises SnapshotError, with the name, for a tensor that the model does not have.
        """


def refuse_unless_tied(
    name: str, shapes: Mapping[str, Shape], output: str, model: LanguageModel
) -> None:
    """Raise SnapshotError for a tensor unless it is a copy of the tied embedding."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_copy = name == output and head.weight is embedding.weight
    if not is_copy or shapes[name] != tuple(embedding.weight.shape):  # type: ignore[arg-type]
        raise SnapshotError(f"it holds {name!r}, which the model does not have")
