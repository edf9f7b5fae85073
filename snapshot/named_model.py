"""The model that a command line names: a run's, with its state, or any other; its whole copy."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from data.tokenizer import TOKENIZER_FILES
from data.tokenizer_files import GENERATION
from model.families import build_empty
from model.family import LanguageModel, ModelConfig
from model.lora import merge_adapters
from snapshot.base import Base, check_weights, open_base, open_base_of
from snapshot.disk.files import (
    MANIFEST,
    expanded,
    snapshot_folders,
    snapshots_in,
    visible,
    write_json,
)
from snapshot.disk.model import (
    CONFIG,
    WHOLE,
    Adapters,
    model_config,
    prefix_of,
    read_adapters,
    read_config,
)
from snapshot.disk.reading import restore_weights
from snapshot.disk.shards import shapes_of, shards_of_weights
from snapshot.disk.state import RunState, read_state
from snapshot.disk.tensor_files import TensorFiles, create_files, plan_files
from snapshot.disk.writing import atomic_folder
from snapshot.errors import SnapshotError
from snapshot.source import newest_snapshot
from store.fetch import INFERENCE, fetch_newest, read_store
from store.hub import Hub
from store.kinds import NAMED_FILES, named_repo

KEY = "model"
TIMEOUT_SECONDS = 60.0
BASE_HELP = "the folder of the base, for a snapshot of adapters"
PIECE_BYTES = 2_000_000_000
"""Bytes of the largest file, as in a snapshot."""


@dataclass(frozen=True)
class NamedModel:
    """A model whose configuration and tokenizer are on this disk, and of a run the weights too."""

    name: str
    """The folder, or the repo with its commit."""
    folder: Path
    sizes: ModelConfig
    state: RunState | None = None
    """The state of the run that it is a snapshot of; None for any other model."""
    from_hub: bool = False
    """Whether somebody else may have written `state`."""
    base: Base | None = None
    adapters: Adapters | None = None
    """What its snapshot holds, if that is not the whole model."""
    base_folder: str | None = None
    """Where their base is now, if they do not lead there."""

    def load(self) -> LanguageModel:
        """The model with its weights, on the CPU. Raises SnapshotError and StoreError."""
        sizes = self.sizes
        if self.base is not None:
            self.base.fetch_weights()
            if check_weights(self.base, sizes):
                sizes = self.base.config(dropout=0.0, activation_checkpointing=False, untied=True)
        base = None
        if self.adapters is not None:  # before a model is built whose sizes nobody has checked
            base = self._base_of(self.adapters)
            base.fetch_weights()
            check_weights(base, replace(self.sizes, lora=None))
        model = build_empty(sizes)
        if base is not None:
            restore_weights(base.folder, model)
        restore_weights(self.folder, model, prefix_of(self.folder))
        return model

    def _base_of(self, adapters: Adapters) -> Base:
        digest = None if self.state is None else self.state.base_digest
        return open_base_of(adapters, digest, self.folder, TIMEOUT_SECONDS, self.base_folder)


def find_model(name: str, base: str | None = None) -> NamedModel:
    """The newest whole snapshot of a run or a repo, a snapshot, or any other model, by its name.

    `base` is the folder of the base of adapters. Raises SnapshotError for what is none of these,
    and StoreError if the Hub cannot be reached.
    """
    found = _find(name)
    if base is not None and found.adapters is None:
        raise SnapshotError(f"--base {base}: {found.name} holds its own weights. Leave it out.")
    return replace(found, base_folder=base)


def _find(name: str) -> NamedModel:
    if NAMED_FILES.fullmatch(name):
        raise SnapshotError(
            f"{name} is a bucket or a folder elsewhere, which only train.py and `python -m "
            "snapshot list` and `verify` read. Name a folder here, or a repo of the Hub."
        )
    path = visible(expanded(name))
    if path.exists():
        if not _is_ours(path):
            return _other(name)
        folder = newest_snapshot(path)
        return _ours(str(folder), folder, from_hub=False)
    if (named := named_repo(name)) is not None:
        repo = read_store(Hub(named[0], TIMEOUT_SECONDS), named[1])
        if repo.folders():
            found = fetch_newest(repo, wanted=INFERENCE)
            assert found.contents is not None
            name = f"{found.contents.name}, {found.path.name}"
            return _ours(name, found.path, from_hub=True)
    return _other(name)


def _is_ours(path: Path) -> bool:
    """Whether a path is a run's or a snapshot's."""
    if snapshot_folders(snapshots_in(path)) or snapshot_folders(path):
        return True
    return (path / MANIFEST).exists() or not (path / CONFIG).exists()


def _ours(name: str, folder: Path, from_hub: bool) -> NamedModel:
    sizes, adapters = model_config(*read_config(folder)), read_adapters(folder)
    if adapters is not None:
        sizes = replace(sizes, lora=adapters.lora)
    return NamedModel(name, folder, sizes, read_state(folder), from_hub, adapters=adapters)


def _other(name: str) -> NamedModel:
    base = open_base(KEY, name, TIMEOUT_SECONDS)
    sizes = base.config(dropout=0.0, activation_checkpointing=False)
    return NamedModel(base.name, base.folder, sizes, base=base)


def merge(source: str, folder: Path, base: str | None = None) -> NamedModel:
    """Write the model to a new folder, which transformers loads and `model.pretrained` takes.

    `base` is as for `find_model`. The weights are float32. Raises SnapshotError for a snapshot that
    is whole and for a folder that exists, StoreError if something cannot be downloaded, OSError if
    the folder cannot be written.
    """
    named = find_model(source, base)
    if named.adapters is None:
        raise SnapshotError(f"{named.name} is whole already: transformers loads it as it is.")
    if os.path.lexists(folder):
        raise SnapshotError(f"{folder} exists. Name a new folder.")
    model = named.load()
    with atomic_folder(folder.parent, folder.name) as building:
        write_model(named, model, building, PIECE_BYTES)
        for name in (*TOKENIZER_FILES, GENERATION):
            if name != GENERATION or (named.folder / name).exists():
                shutil.copyfile(named.folder / name, building / name)
    return named


def write_model(named: NamedModel, model: LanguageModel, folder: Path, piece_bytes: int) -> None:
    """Write the weights of a loaded model in float32, in files of such a size, and its config.

    Adapters are merged into the model. Raises OSError if the folder cannot be written.
    """
    if named.adapters is not None:
        merge_adapters(model)
    shards = shards_of_weights(model.layout(), WHOLE)
    planned = plan_files(shapes_of(shards), WHOLE, piece_bytes)
    create_files(folder, WHOLE, planned)
    with TensorFiles(folder, planned, maps=True) as files:
        for shard in shards:
            shard.write(files)
    write_json(folder / CONFIG, named.sizes.config_json())
