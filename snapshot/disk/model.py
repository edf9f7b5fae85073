"""The model of a snapshot: what config.json describes, or base.json, which names a base.

A snapshot that holds only what is trained has a `base.json` and no config.json, so that no other
program takes a part of the weights for all of them. It names the base that holds the rest, with the
hash of each of its files, and repeats its config.json. Adapters (LoRA) are in peft's format, which
transformers loads with their base. All of it is untrusted input.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from model import families
from model.family import ModelConfig
from model.gpt import GPT2
from model.layout import Layout, ModelError
from model.lora import Lora, LoraError
from snapshot.config_values import value_of
from snapshot.disk.files import list_files, listed_files, read_json, write_json
from snapshot.errors import SnapshotError

CONFIG = "config.json"
BASE = "base.json"
ADAPTER_CONFIG = "adapter_config.json"
WHOLE, TRAINED, ADAPTERS = "model", "trained", "adapter_model"
"""How the names of the files with weights begin: of all, of those that are trained, of adapters."""
COMMIT = re.compile(r"[A-Za-z0-9]{5,128}")
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Files of a whole model that hold weights."""
LARGEST_RANK = 2**16
LONGEST_NAME = 3_900


@dataclass(frozen=True)
class BaseReference:
    """A model whose weights a snapshot does not repeat."""

    name: str
    """A folder, or a repo of the Hub. Of a folder the name alone, if the snapshot is uploaded."""
    commit: str | None
    """The commit of the repo; None for a folder."""
    files: dict[str, tuple[int, str]] = field(repr=False)
    """Size and sha256 of each file with weights."""
    config: dict[str, Any] = field(repr=False)
    """The content of its config.json."""
    lora: Lora | None = None
    """The adapters that are trained, if there are any."""

    @property
    def prefix(self) -> str:
        """How the names of the snapshot's files with weights begin."""
        return TRAINED if self.lora is None else ADAPTERS

    def write(self, folder: Path) -> None:
        """Write `base.json`, and `adapter_config.json` for adapters."""
        content = {"name": self.name, "commit": self.commit, "files": list_files(self.files)}
        write_json(folder / BASE, {**content, "config": self.config})
        if self.lora is not None:
            write_json(folder / ADAPTER_CONFIG, self._adapter_config(self.lora))

    def _adapter_config(self, lora: Lora) -> dict[str, Any]:
        """What peft needs to know."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.name,
            "revision": self.commit,
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "lora_dropout": lora.dropout,
            "target_modules": list(lora.targets),
            "fan_in_fan_out": self.config.get("model_type") == GPT2,
            "bias": "none",
            "inference_mode": True,
        }


def prefix_of(reference: BaseReference | None) -> str:
    """How the names of a snapshot's files with weights begin."""
    return WHOLE if reference is None else reference.prefix


def configured_prefix(config: dict[str, Any]) -> str:
    """How they begin in the snapshots of a run with this configuration."""
    if value_of(config, "model.lora_rank") is not None:
        return ADAPTERS
    return TRAINED if value_of(config, "snapshot.whole") is False else WHOLE


def model_config(
    content: Any, where: str, dropout: float = 0.0, activation_checkpointing: bool | str = False
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
        layout.refuse_undescribed()


@contextmanager
def model_errors(beginning: str = "") -> Iterator[None]:
    """Turn ModelError, which is the rest of a sentence, into SnapshotError."""
    try:
        yield
    except ModelError as error:
        raise SnapshotError(f"{beginning}{error}") from error


def read_config(folder: Path) -> tuple[Any, str]:
    """The config.json of the model in a folder, and where it is written, for messages."""
    if (reference := read_reference(folder)) is not None:
        return reference.config, f"the config in {folder / BASE}"
    return read_json(folder / CONFIG), str(folder / CONFIG)


def read_reference(folder: Path) -> BaseReference | None:
    """The base of a snapshot; None if the snapshot is whole. Raises SnapshotError."""
    path = folder / BASE
    if not path.exists():
        return None
    content = read_json(path)
    fault = SnapshotError(f"{path} does not name a base as a snapshot does")
    if not isinstance(content, dict) or set(content) != {"name", "commit", "files", "config"}:
        raise fault
    name, commit, files, config = (content[key] for key in ("name", "commit", "files", "config"))
    is_commit = isinstance(commit, str) and COMMIT.fullmatch(commit) is not None
    if not isinstance(name, str) or not is_name(name) or not (commit is None or is_commit):
        raise fault
    entries = listed_files(files, WEIGHTS, str(path), fault)
    if not isinstance(config, dict) or not entries:
        raise fault
    found = BaseReference(name, commit, entries, config)
    return replace(found, lora=_read_lora(folder, found))


def is_name(name: str) -> bool:
    """Whether a text may be the name of a base."""
    return 0 < len(name.encode(errors="replace")) <= LONGEST_NAME and "\0" not in name


def _read_lora(folder: Path, found: BaseReference) -> Lora | None:
    """The adapters of a snapshot with this base; None if it has none. Raises SnapshotError."""
    path = folder / ADAPTER_CONFIG
    if not path.exists():
        return None
    content = read_json(path)
    fault = SnapshotError(f"{path} is not what this project writes")
    if not isinstance(content, dict):
        raise fault
    keys = ("r", "lora_alpha", "lora_dropout", "target_modules")
    values: list[Any] = [content.get(key) for key in keys]
    rank, alpha, dropout, targets = values
    if type(rank) is not int or type(alpha) is not int or type(dropout) not in (float, int):
        raise fault
    if not 1 <= rank <= LARGEST_RANK or not 1 <= alpha <= LARGEST_RANK:
        raise fault
    if not 0 <= dropout < 1 or not _are_names(targets):
        raise fault
    lora = Lora(rank, alpha, tuple(targets), dropout)
    if content != found._adapter_config(lora):
        raise fault
    return lora


def _are_names(targets: Any) -> bool:
    is_list = isinstance(targets, list) and len(targets) > 0
    return is_list and all(isinstance(one, str) and one.isidentifier() for one in targets)
