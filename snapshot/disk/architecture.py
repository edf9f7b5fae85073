"""The model that a config.json describes, which is untrusted input, and the layout of its files."""

from __future__ import annotations

from typing import Any

from model import families
from model.family import ModelConfig
from model.layout import Layout, ModelError
from model.lora import LoraError
from snapshot.errors import SnapshotError


def model_config(
    content: Any, where: str, dropout: float = 0.0, activation_checkpointing: bool = False
) -> ModelConfig:
    """The sizes of the model in a config.json.

    `where` names it in messages. Raises SnapshotError for a model that cannot be built here.
    """
    if not isinstance(content, dict):
        raise SnapshotError(f"{where} is not the configuration of a model")
    try:
        return families.model_config(content, dropout, activation_checkpointing)
    except ModelError as error:
        raise SnapshotError(f"{where} {error}") from error


def layout_for(config: ModelConfig) -> Layout:
    """The layout of a model of these sizes, of which no parameter has memory.

    Raises SnapshotError for sizes that contradict each other.
    """
    try:
        return families.layout_without_memory(config)
    except ModelError as error:
        raise SnapshotError(f"its config.json {error}") from error
    except LoraError as error:
        raise SnapshotError(str(error).rstrip(".")) from error


def check_described(layout: Layout) -> None:
    """Raise SnapshotError where the config.json of a snapshot would describe another model."""
    try:
        layout.refuse_undescribed()
    except ModelError as error:
        raise SnapshotError(str(error)) from error
