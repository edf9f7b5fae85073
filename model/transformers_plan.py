"""How processes share the matrices of a model of transformers: its own plan, in words of ours.

transformers says for each architecture how a linear layer is cut (`base_model_tp_plan`). Only a
model whose plan covers all that a cut layer leads to is taken: a norm of heads that is not in the
plan would be trained with a part of its gradient. The experts of a mixture are not cut, so a
mixture has no plan.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from torch import nn

from model.frozen import FrozenLinear
from model.head import Head
from model.lora import is_adapter, name_in_model, without_adapter

LINEAR = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_gather_output": "entry colwise gather",
    "rowwise_split_input": "split rowwise",
}
"""transformers' words for linear layers, as ways of `model.tensor`."""
NORM, EMBEDDING = "replicated_with_grad_allreduce", "embedding_rowwise"
ENTERED = "colwise"
"""A layer whose input has a part of its gradient on each process."""


def tensor_plan(lm: Any, prefix: str, once: bool) -> dict[str, str]:
    """The plan of a module of transformers, whose names get a prefix; empty if it has none.

    A layer's input is entered `once` for all its matrices, or for each of them. Once is for
    architectures whose layers use it in no other way, because its gradient is summed there.
    """
    modules: dict[str, list[Any]] = defaultdict(list)
    for name, module in lm.named_modules():
        modules[_pattern(name)].append(module)
    ends = {_pattern(name): way for name, way in _ends(lm).items()}
    words: dict[str, str] = lm._tp_plan or {}
    plan: dict[str, str] = {}
    for pattern, word in words.items():
        if pattern in modules and pattern not in ends and word != EMBEDDING:
            if (way := _way(modules[pattern], word)) is None:
                return {}
            plan[pattern] = way
    if not plan:
        return {}
    for parent in {one.rpartition(".")[0] for one, way in plan.items() if way == ENTERED}:
        inside = {one: way for one, way in plan.items() if one.startswith(f"{parent}.")}
        if not all(_covers(inside, parent, one) for one in modules[parent]):
            return {}
        if once:
            plan[parent] = "entry"
        else:
            plan |= {one: f"entry {way}" for one, way in inside.items() if way == ENTERED}
    return {f"{prefix}{one}": way for one, way in {**plan, **ends}.items()}


def _pattern(name: str) -> str:
    """A name with `*` for each number in it, as in transformers' plans."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _way(found: list[Any], word: str) -> str | None:
    """What transformers' word for these modules is here; None if it is unknown."""
    if word == NORM:
        return "norm"
    kinds = {type(without_adapter(one)) for one in found}
    return LINEAR.get(word) if kinds <= {nn.Linear, FrozenLinear} else None


def _covers(inside: dict[str, str], parent: str, module: nn.Module) -> bool:
    """Whether a plan has every parameter of a module with cut layers."""
    own = [name_in_model(name) for name, _ in module.named_parameters() if not is_adapter(name)]
    names = (f"{parent}.{_pattern(name)}" for name in own)
    return all(name.rpartition(".")[0] in inside for name in names)


def _ends(lm: Any) -> dict[str, str]:
    """The token embedding and the output layer, where both can be cut."""
    names = {module: name for name, module in lm.named_modules()}
    first, last = lm.get_input_embeddings(), lm.get_output_embeddings()
    if not isinstance(first, nn.Embedding) or not isinstance(last, nn.Linear):
        return {}
    way = "head" if isinstance(last, Head) else "entry colwise gather"
    return {names[first]: "embedding", names[last]: way}
