"""The layout of a module of transformers: from its parameters to the tensors of the Hub, and back.

transformers keeps, for each architecture, rules that rename, split and join tensors: the experts of
a mixture are one parameter in memory, and one tensor each in a file. Its own loader applies the
rules to a whole model; here they are applied to one parameter at a time, so that a process reads
nothing but its shard.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from model.family import LanguageModel
from model.layout import Layout, ModelError, Shape, Stored, Written


class TransformersLayout(Layout):
    """The layout of a `model.causal_lm.CausalLM`."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self._lm: Any = model.named

    def written(self) -> list[Written]:
        shapes = {
            name: torch.empty(one.shape, device="meta") for name, one in self.parameters().items()
        }
        rules = get_model_conversion_mapping(self._lm, add_legacy=False)[::-1]
        converters = [one for one in rules if isinstance(one, WeightConverter)]
        backwards: Any = [one.reverse_transform() for one in converters]
        groups: dict[str, list[str]] = {}
        converted = set()
        for name in shapes:
            group, pattern = apply_converters(name, backwards)
            groups.setdefault(group, []).append(name)
            converted |= set() if pattern is None else {group}
        return [
            Written(
                tuple(names),
                {
                    key: tuple(one.shape)
                    for key, one in self._to_files({name: shapes[name] for name in names}).items()
                },
                self._to_files if group in converted else None,
            )
            for group, names in groups.items()
        ]

    def _to_files(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        converted = revert_weight_conversion(self._lm, dict(parameters))
        alone = len(converted) == 1
        # Parts of one parameter share its memory, which safetensors does not write.
        return {
            name: one.contiguous() if alone else one.contiguous().clone()
            for name, one in converted.items()
        }

    def find(self, shapes: Mapping[str, Shape]) -> dict[str, Stored]:
        known = self.parameters()
        rules = get_model_conversion_mapping(self._lm)
        renamings = [one for one in rules if isinstance(one, WeightRenaming | PrefixChange)]
        converters = [one for one in rules if isinstance(one, WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        names: dict[str, list[tuple[str, str | None]]] = {}
        prefix, aliases = self._lm.base_model_prefix, dict(self._lm.all_tied_weights_keys)
        copies: dict[str, str] = {}
        for name in sorted(shapes, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, known)
            if target not in known and name in known:  # it has the name in memory already
                target, pattern = name, None
            if target in known:
                names.setdefault(target, []).append((name, pattern))
            elif target in aliases:
                self._refuse_unless_tied(name, shapes[name], name)
                copies[aliases[target]] = name
            elif not self._is_ignored(target):
                raise ModelError(f"it holds {name!r}, which the model does not have")
        stored = {}
        for target, found in names.items():
            if found[0][1] is None:
                stored[target] = Stored((found[0][0],))
            else:
                stored |= self._converted(target, found, by_pattern[found[0][1]], shapes)
        # Of a file that holds a tied tensor by its other name alone.
        return {**{target: Stored((name,)) for target, name in copies.items()}, **stored}

    def _converted(
        self,
        target: str,
        found: list[tuple[str, str | None]],
        rule: WeightConverter,
        shapes: Mapping[str, Shape],
    ) -> dict[str, Stored]:
        """Where the parameters lie that a rule makes of the tensors `found`: at least `target`."""

        def convert(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
            once: Any = deepcopy(rule)  # it collects tensors
            for (name, pattern), tensor in zip(found, tensors, strict=True):
                once.add_tensor(target, name, pattern, tensor)
            made = once.convert(target, model=self._lm, config=self._lm.config)
            return {key: one[0] if isinstance(one, list) else one for key, one in made.items()}

        names = tuple(name for name, _ in found)
        try:
            made = convert([torch.empty(shapes[name], device="meta") for name in names])
        except Exception as error:  # of torch, for shapes that do not match
            raise ModelError(f"it holds {names[0]!r} and its like in wrong shapes") from error
        return {
            key: Stored(names, convert=lambda tensors, key=key: convert(tensors)[key])  # type: ignore[misc]
            for key in made
        }

    def _is_ignored(self, name: str) -> bool:
        """Whether transformers itself leaves out this tensor: a constant of older files."""
        patterns = set(self._lm._keys_to_ignore_on_load_unexpected or ())
        return any(re.search(pattern, name) for pattern in {*patterns, r"rotary_emb\.inv_freq$"})
