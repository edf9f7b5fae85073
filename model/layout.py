"""How the parameters of a model are named and laid out in the files of a snapshot.

A model of our own has the same names in memory and in files; some of its weights may be stored
transposed. A module of transformers has its own names in memory; in files it has those of the Hub,
which may split or join parameters (`model.transformers_layout`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn

from model.frozen import full_parameters, packed_layers
from model.lora import is_adapter, name_in_files, name_in_model
from model.tensor import PARTS

Shape = tuple[int, ...]
FLOAT_BYTES = 4
OUTPUT = "lm_head.weight"
"""The name of the output layer; if it is tied, files need not hold it."""


class ModelError(ValueError):
    """A model, or a tensor in its files, that this project cannot use: the rest of a sentence."""


@dataclass(frozen=True)
class Written:
    """Parameters that are converted and written at once; mostly one."""

    parameters: tuple[str, ...]
    shapes: dict[str, Shape]
    """By the names of the tensors in the file."""
    convert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None = None
    """From the full parameters to the tensors in the file, which are contiguous; None for one
    parameter that the file holds as it is, or transposed."""
    transposed: bool = False
    """Whether the file holds the one tensor, or the joined ones, transposed."""


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


def written_under(name: str, tensors: Mapping[str, Tensor], transposed: bool) -> Written:
    """How a file holds a tensor under a name, or several of training, joined by rows."""
    shape = tuple(next(iter(tensors.values())).shape)
    if len(tensors) == 1:
        return Written((*tensors,), {name: shape[:: -1 if transposed else 1]}, None, transposed)
    rows = sum(one.shape[0] for one in tensors.values() if shape)
    joined = (rows, *shape[1:]) if shape else ()

    def convert(whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # What an optimizer counts is one number, and the same for all.
        one = torch.cat([*whole.values()]) if shape else next(iter(whole.values()))
        return {name: one.t().contiguous() if transposed else one}

    return Written((*tensors,), {name: joined[:: -1 if transposed else 1]}, convert, transposed)


def stored_under(name: str, transposed: bool, number: int = 0, count: int = 1) -> Stored:
    """Where the tensor of this number lies, of so many that `written_under` joins."""
    if count == 1:
        return Stored((name,), transposed)

    def convert(tensors: Sequence[Tensor]) -> Tensor:
        whole = tensors[0].t() if transposed else tensors[0]
        return whole.chunk(count)[number] if whole.dim() else whole

    return Stored((name,), convert=convert)


def is_frozen(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns of optim.freeze, with * and ?, matches a parameter's name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class Layout:
    """The layout of one model. Its parameters may be on any device, or sharded."""

    def __init__(
        self,
        model: Any,
        transposed: tuple[str, ...] = (),
        optional_prefix: str = "",
        constants: tuple[str, ...] = (),
    ) -> None:
        """The layout of a `LanguageModel` whose files have the names of its parameters.

        Names that end with one of `transposed` are those of weights that files hold as (inputs,
        outputs). Files of others may lack the prefix, and hold `constants`, which are not read.
        """
        self.model = model
        self._transposed, self._prefix, self._constants = transposed, optional_prefix, constants

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters by their names in the module, tied ones once; packed ones unpacked."""
        return full_parameters(self.model.named)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by name, without those of adapters."""
        return {name_in_model(name): one for name, one in self._named() if not is_adapter(name)}

    def adapters(self) -> dict[str, nn.Parameter]:
        """The parameters of adapters, by peft's names in files."""
        return {name_in_files(name): one for name, one in self._named() if is_adapter(name)}

    def packed(self) -> dict[str, nn.Parameter]:
        """The weights that are packed in four bits, by the names of `parameters`."""
        return {
            name_in_model(f"{name}.weight"): cast(nn.Parameter, layer.weight)
            for name, layer in packed_layers(self.model.named)
        }

    def trained(self) -> dict[str, nn.Parameter]:
        """Those that are trained. The optimizer's file has their names."""
        both = {**self.parameters(), **self.adapters()}
        return {name: one for name, one in both.items() if one.requires_grad}

    def parts(self) -> dict[nn.Parameter, int]:
        """What is trained, as an optimizer is built from it (see `optim.optimizers.Parts`)."""
        matrices = self.model.matrices()
        return {one: matrices.get(one, 0) for one in self.trained().values()}

    def embedding_name(self) -> str:
        """The name of the token embedding's weight."""
        embedding = self.model.get_input_embeddings().weight
        return next(name for name, one in self.parameters().items() if one is embedding)

    def freeze(self, patterns: Sequence[str]) -> None:
        """Exclude the parameters whose names match from training."""
        for name, parameter in self.parameters().items():
            if is_frozen(name, patterns):
                parameter.requires_grad_(False)

    def is_transposed(self, name: str) -> bool:
        """Whether files hold this parameter, and so its moments, transposed."""
        return name.endswith(self._transposed)

    def by_file_name(self, names: Iterable[str]) -> dict[str, list[str]]:
        """These names of parameters, by the tensor in a file: several of one that is `Joined`."""
        found: dict[str, list[str]] = {}
        for name in names:
            layer, is_part, rest = name.partition(PARTS)
            file = f"{layer}.{rest.partition('.')[2]}" if is_part else name
            found.setdefault(file, []).append(name)
        return found

    def written(self) -> list[Written]:
        """What is written of a whole model, in the order of the file."""
        parameters, written = self.parameters(), []
        for file, names in self.by_file_name(parameters).items():
            tensors = {name: parameters[name] for name in names}
            written.append(written_under(file, tensors, self.is_transposed(file)))
        return written

    def find(self, shapes: Mapping[str, Shape]) -> dict[str, Stored]:
        """Where each parameter lies, in files with tensors of these names and shapes.

        Raises ModelError, with the name, for a tensor that the model does not have.
        """
        known, found = self.by_file_name(self.parameters()), {}
        for name in shapes:
            full = name if name in known else f"{self._prefix}{name}"
            if full in known:
                for number, parameter in enumerate(known[full]):
                    transposed, count = self.is_transposed(full), len(known[full])
                    found[parameter] = stored_under(name, transposed, number, count)
            elif not name.endswith(self._constants):
                self._refuse_unless_tied(name, shapes[name], OUTPUT)
        if OUTPUT in shapes:  # of a file that holds the tied tensor by this name alone
            found.setdefault(self.embedding_name(), Stored((OUTPUT,)))
        return found

    def _refuse_unless_tied(self, name: str, shape: Shape, output: str) -> None:
        """Raise ModelError for a tensor unless it is a copy of the tied embedding."""
        head, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        is_copy = name == output and head.weight is embedding.weight
        if not is_copy or shape != tuple(embedding.weight.shape):
            raise ModelError(f"it holds {name!r}, which the model does not have")
