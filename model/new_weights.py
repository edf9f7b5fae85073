"""New weights: the same numbers on every shape, and no process has all of them.

A model is built without memory. When it is prepared, each process draws one block after another,
whole, and keeps its shard. The numbers of a block are a function of the seed and of its name: no
process sends any, and neither the depth nor the number of processes changes them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from model.layout import ModelError
from model.lora import is_adapter
from model.sharded import local_part, slices_of

ATEN = torch.ops.aten
WITHOUT_VALUES = (ATEN.empty, ATEN.empty_strided, ATEN.rand, ATEN.randn, ATEN.normal)
"""What makes new tensors that are no constants."""
FILLS = (ATEN.normal_, ATEN.uniform_, ATEN.fill_, ATEN.zero_)
"""What gives a tensor values. To draw none, for one without memory, torch imports its compiler."""
Modules = dict[str, nn.Module]
"""Modules by name, children before their parents."""


class WithoutMemory(TorchDispatchMode):
    """Inside, new tensors have no memory, unless they are constants, such as `torch.arange(8)`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, for a second, only to skip this class

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if func.overloadpacket in FILLS and args[0].is_meta:
            return args[0]
        if any(one.is_meta for one in given):
            args, kwargs = tree_map_only(Tensor, lambda one: one.to("meta"), (args, kwargs))
            kwargs |= {"device": "meta"} if "device" in kwargs else {}
        elif not given and func.overloadpacket in WITHOUT_VALUES:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


@torch.no_grad()
def draw(model: Any, template: Any, seed: int, adapters_only: bool = False) -> None:
    """Give a model of `build_empty`, prepared or not, the values that a new one begins with.

    They are a function of the seed and of the modules' names; `template`, the same model without
    memory, draws them. Raises ModelError for a parameter that nothing initialises.
    """
    layout, of_template = model.layout(), template.layout()
    targets = {**layout.parameters(), **layout.adapters()}
    parts = layout.by_file_name(targets)
    names = {one: name for name, one in of_template.adapters().items()}
    if not adapters_only:
        names |= {one: name for name, one in of_template.parameters().items()}
    for place, modules in _units(template):
        drawn = _with_memory(modules, names)
        for of_adapters in (False, True):
            with _seeded(f"{seed} {place} {'adapters' if of_adapters else ''}"):
                for name, module in modules.items():
                    is_drawn = any(one in drawn for one in module.parameters())
                    if is_drawn and is_adapter(name) == of_adapters:
                        _initialise(template, name, module)
        for one, name in drawn.items():
            if one.isnan().any():
                raise ModelError(
                    f"cannot be trained from new weights: nothing gives {name} a value. Begin with "
                    "the weights of such a model (model.pretrained)"
                )
            count = len(parts[name])
            for part, rows in zip(
                parts[name], one.chunk(count) if one.dim() else [one], strict=True
            ):
                local_part(targets[part]).copy_(rows[slices_of(targets[part])])
            one.data = torch.empty(0)  # the next block needs the memory


def _units(model: Any) -> Iterator[tuple[str, Modules]]:
    """The blocks, and every module outside of them, by name."""
    inside = {one for block in model.blocks for one in block.modules()}
    blocks = {*model.blocks}
    for name, module in model.named_modules():
        if module in blocks:
            yield name, dict(reversed([*module.named_modules(prefix=name)]))
        elif module not in inside:
            yield name, {name: module}


def _with_memory(modules: Modules, names: dict[nn.Parameter, str]) -> dict[nn.Parameter, str]:
    """Give the modules' parameters of these names memory, each once, filled with NaN.

    Those that are constants have memory, and keep their values.
    """
    drawn: dict[nn.Parameter, str] = {}
    for module in modules.values():
        for key, one in module._parameters.items():
            if one is None or one not in names:
                continue
            name, new = names.pop(one), one
            if one.is_meta:
                new = nn.Parameter(torch.full(one.shape, math.nan, dtype=one.dtype))
                module._parameters[key] = new
            drawn[new] = name
    return drawn


def _initialise(model: Any, name: str, module: nn.Module) -> None:
    """Draw the parameters of a module, as its model says, or peft, or torch."""
    if not is_adapter(name):
        model.initialise(module)
    own = [one for one in module.parameters(recurse=False) if not one.is_meta]
    reset: Any = getattr(module, "reset_parameters", None)
    if reset is not None and any(bool(one.isnan().any()) for one in own):
        reset()
    if ".lora_B." in name:  # so that an adapter changes nothing at first
        for one in own:
            one.zero_()


@contextmanager
def _seeded(words: str) -> Iterator[None]:
    """Seed torch's generator of the CPU, and restore it."""
    before = torch.get_rng_state()
    digest = hashlib.sha256(words.encode()).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest[:8]) >> 1)
    try:
        yield
    finally:
        torch.set_rng_state(before)
