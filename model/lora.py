"""Low-rank adapters (LoRA; Hu et al., 2021): small matrices that are trained, around frozen layers.

peft adds them to the linear layers of a model's blocks; it is imported only then.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from torch import nn

ADAPTER = "default"
"""peft's name for the only adapter of a model."""
WRAPPED = ".base_layer."
"""What peft puts into the names of a layer that it wraps."""
FILE_PREFIX = "base_model.model."
"""What peft's files put before the names."""
INSTALL = "Install it with: pip install -r requirements-models.txt"


class LoraError(ValueError):
    """Adapters that a model cannot have: a sentence with the key, the value and the remedy."""


@dataclass(frozen=True)
class Lora:
    """The size and the place of adapters. `dropout` is a probability, on their input."""

    rank: int
    alpha: int
    """What an adapter computes is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of linear layers in the blocks, such as q_proj; none: all of them."""
    dropout: float = 0.0

    def of(self, blocks: Iterable[nn.Module]) -> Lora:
        """The same with the names of its layers. Raises LoraError for a name that is no layer's."""
        layers = {
            name.rpartition(".")[2]
            for block in blocks
            for name, module in block.named_modules()
            if isinstance(module, nn.Linear) and name.rpartition(".")[2].isidentifier()
        }
        if not layers:
            raise LoraError(
                f"model.lora_rank={self.rank}: the model has no linear layers to adapt."
            )
        for target in self.targets:
            if target not in layers:
                raise LoraError(
                    f"model.lora_targets={list(self.targets)}: {target!r} is not a linear layer "
                    f"of the model's blocks. They are {', '.join(sorted(layers))}."
                )
        return replace(self, targets=tuple(sorted(self.targets or layers)))


def add_adapters(model: nn.Module, blocks: Iterable[nn.Module], lora: Lora) -> Lora:
    """Freeze a model, and add trainable adapters to layers of its blocks, which change nothing yet.

    Returns `lora` with the names of the layers. The new weights are drawn from torch's generator.
    Raises LoraError if the model has no such layers, or if peft is not installed.
    """
    if find_spec("peft") is None:
        raise LoraError(f"model.lora_rank needs peft, which is not installed. {INSTALL}")
    # peft would import them: seconds of every start (see frozen.py).
    with hidden("bitsandbytes"), hidden("torchao"):
        from peft import LoraConfig, inject_adapter_in_model

        where = lora.of(blocks)
        config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=list(where.targets),
        )
        try:
            inject_adapter_in_model(config, model, ADAPTER)
        except ValueError as error:  # layers that peft knows to break
            raise LoraError(
                f"model.lora_targets={list(where.targets)} cannot be adapted: {error}. Name others."
            ) from error
    return where


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Have every look for a package, and every import of it, find that it is not installed."""
    modules: dict[str, Any] = sys.modules
    before = {package: modules[package]} if package in modules else {}
    modules[package] = None
    try:
        yield
    finally:
        del modules[package]
        modules |= before


def merge_adapters(model: nn.Module) -> None:
    """Add what the adapters have learned to the weights of the layers that they are around."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.merge()


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return ".lora_" in name


def name_in_model(name: str) -> str:
    """The name of a frozen parameter without adapters around it."""
    return name.replace(WRAPPED, ".")


def name_in_files(name: str) -> str:
    """The name of an adapter's parameter in peft's files."""
    return FILE_PREFIX + name.replace(f".{ADAPTER}.", ".")
