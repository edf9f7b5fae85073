"""The model of a snapshot: what its config.json describes, or adapters on a base.

A snapshot of adapters (LoRA) is in peft's format, which transformers loads with its base: it has an
adapter_config.json, which names the base, and no config.json, with which transformers would expect
all weights. The base's is in its state.json. All of it is untrusted input.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from model import families
from model.family import ModelConfig
from model.layout import Layout, ModelError
from model.lora import Lora, LoraError
from snapshot.config_values import value_of
from snapshot.disk.folder import between, matches, read_json
from snapshot.disk.state import STATE
from snapshot.errors import SnapshotError

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
WHOLE, ADAPTERS, MOMENTS = "model", "adapter_model", "optimizer"
"""How the names of files begin: with all weights, with adapters, with what an optimizer keeps."""
ALWAYS = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "inference_mode": True}
"""The same in each adapter_config.json."""
PEFT = {
    **ALWAYS,
    **dict.fromkeys(("r", "lora_alpha"), range(1, 2**16 + 1)),
    "lora_dropout": between(0, 1),
    "target_modules": [re.compile(r"[^\W\d]\w*")],
    "base_model_name_or_path": re.compile("[^\0\ud800-\udfff]{1,1000}"),
    "revision": (None, re.compile(r"[A-Za-z0-9]{5,128}")),
    "fan_in_fan_out": bool,
}
"""What an adapter_config.json of this project holds, for `matches`."""


@dataclass(frozen=True)
class Adapters:
    """The adapters of a snapshot, and the base that they are trained around."""

    lora: Lora
    base: str
    """A folder, or a repo of the Hub. Of a folder the name alone, if the snapshot is uploaded."""
    revision: str | None
    """The commit of the repo; None for a folder."""
    transposed: bool
    """Whether the base's files hold the weights of its layers as (inputs, outputs)."""

    def content(self) -> dict[str, Any]:
        """What peft needs to know: `adapter_config.json`."""
        return {
            **ALWAYS,
            "base_model_name_or_path": self.base,
            "revision": self.revision,
            "r": self.lora.rank,
            "lora_alpha": self.lora.alpha,
            "lora_dropout": self.lora.dropout,
            "target_modules": list(self.lora.targets),
            "fan_in_fan_out": self.transposed,
        }


def trains_adapters(config: dict[str, Any]) -> bool:
    """Whether the snapshots of a run with this configuration hold adapters."""
    return value_of(config, "model.lora_rank") is not None


def prefix_of(folder: Path) -> str:
    """How the names of a snapshot's files with weights begin."""
    return ADAPTERS if (folder / ADAPTER_CONFIG).exists() else WHOLE


def model_config(
    content: Any, where: str, dropout: float = 0.0, activation_checkpointing: bool = False
) -> ModelConfig:
    """The sizes of the model in a config.json.

    `where` names it in messages. Raises SnapshotError for a model that cannot be built here.
    """
    if not isinstance(content, dict):
        raise SnapshotError(f"{where} is not the configuration of a model")
    with model_errors(f"{where} "):
        return families.model_config(content, dropout, activation_checkpointing)


def layout_for(config: ModelConfig) -> Layout:
    """The layout of a model of these sizes, of which no parameter has memory.

    Raises SnapshotError for sizes that contradict each other.
    """
    try:
        with model_errors("its config.json "):
            return families.layout_without_memory(config)
    except LoraError as error:
        raise SnapshotError(str(error).rstrip(".")) from error


def check_described(layout: Layout) -> None:
    """Raise SnapshotError where the config.json of a snapshot would describe another model."""
    with model_errors():
        layout.model.refuse_undescribed()


@contextmanager
def model_errors(beginning: str = "") -> Iterator[None]:
    """Turn ModelError, which is the rest of a sentence, into SnapshotError."""
    try:
        yield
    except ModelError as error:
        raise SnapshotError(f"{beginning}{error}") from error


def read_config(folder: Path) -> tuple[Any, str]:
    """The config.json of the model in a folder, and where it is written, for messages."""
    if prefix_of(folder) == WHOLE:
        return read_json(folder / CONFIG), str(folder / CONFIG)
    state = read_json(folder / STATE)
    where = f"the base_config in {folder / STATE}"
    return state.get("base_config") if isinstance(state, dict) else None, where


def read_adapters(folder: Path) -> Adapters | None:
    """The adapters of a snapshot; None if it holds a whole model. Raises SnapshotError."""
    if prefix_of(folder) == WHOLE:
        return None
    content = read_json(folder / ADAPTER_CONFIG)
    if not matches(content, PEFT):
        raise SnapshotError(f"{folder / ADAPTER_CONFIG} is not what this project writes")
    targets = tuple(content["target_modules"])
    return Adapters(
        Lora(content["r"], content["lora_alpha"], targets, content["lora_dropout"]),
        content["base_model_name_or_path"],
        content["revision"],
        content["fan_in_fan_out"],
    )


def model_of(folder: Path) -> ModelConfig:
    """The sizes of the model in a snapshot, with its adapters, if it holds those alone.

    Raises SnapshotError for a model that cannot be built here.
    """
    sizes, adapters = model_config(*read_config(folder)), read_adapters(folder)
    return sizes if adapters is None else replace(sizes, lora=adapters.lora)
