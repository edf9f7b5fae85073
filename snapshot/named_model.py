"""The model that a command line names: a run's, with its state, or any other; its whole copy."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from data.subwords import tokenizer_of
from data.tokenizer import Tokenizer, refuse_larger_than
from data.tokenizer_files import GENERATION
from model.families import build_empty
from model.family import LanguageModel, ModelConfig
from model.lora import merge_adapters
from snapshot.base import Base, base_of, check_weights, open_base_of
from snapshot.disk.folder import (
    MANIFEST,
    atomic_folder,
    write_json,
)
from snapshot.disk.load import restore_weights
from snapshot.disk.model import (
    CONFIG,
    WHOLE,
    Adapters,
    model_config,
    prefix_of,
    read_adapters,
    read_config,
)
from snapshot.disk.state import RunState, read_state
from snapshot.disk.tensor_files import TensorFiles, create_files, plan_files
from snapshot.disk.tensors import entries_of_weights, shapes_of
from snapshot.errors import SnapshotError
from snapshot.source import TIMEOUT_SECONDS, Source, find
from store.fetch import INFERENCE

BASE_HELP = "the folder or URL of the base, for a snapshot of adapters"
PIECE_BYTES = 2_000_000_000
"""Bytes of the largest file, as in a snapshot."""


@dataclass(frozen=True)
class NamedModel:
    """A model whose configuration and tokenizer are on this disk, and of a run the weights too."""

    name: str
    """The folder, or the store with its commit."""
    folder: Path
    sizes: ModelConfig
    state: RunState | None = None
    """The state of the run that it is a snapshot of; None for any other model."""
    from_store: bool = False
    """Whether somebody else may have written `state`."""
    base: Base | None = None
    adapters: Adapters | None = None
    """What its snapshot holds, if that is not the whole model."""
    base_name: str | None = None
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

    def tokenizer(self) -> Tokenizer:
        """Its tokenizer. Raises DataError for one with more tokens than the model has."""
        tokenizer = tokenizer_of(self.folder)
        refuse_larger_than(self.sizes.vocab_size, tokenizer, str(self.folder))
        return tokenizer

    def _base_of(self, adapters: Adapters) -> Base:
        digest = None if self.state is None else self.state.base_digest
        return open_base_of(adapters, digest, self.folder, TIMEOUT_SECONDS, self.base_name)


def find_model(name: str, base: str | None = None) -> NamedModel:
    """The newest whole snapshot of a run or a store, a snapshot, or any other model, by its name.

    `base` is where the base of adapters is. Raises SnapshotError for what is none of these, and
    StoreError if a store cannot be reached.
    """
    source = find(name, any_model=True)
    path = source.path
    if path is not None:  # what has no config.json is no model: `fetch` says what is wrong
        is_ours = source.is_run or (path / MANIFEST).exists() or not (path / CONFIG).exists()
    else:
        is_ours = source.is_run
    if is_ours:
        named = _of_run(source)
    else:
        found = base_of(f"model={name}", source)
        sizes = found.config(dropout=0.0, activation_checkpointing=False)
        named = NamedModel(found.name, found.folder, sizes, base=found)
    if base is not None and named.adapters is None:
        raise SnapshotError(f"--base {base}: {named.name} holds its own weights. Leave it out.")
    return replace(named, base_name=base)


def _of_run(source: Source) -> NamedModel:
    found = source.fetch(wanted=INFERENCE)
    folder, name = found.path, found.name
    sizes, adapters = model_config(*read_config(folder)), read_adapters(folder)
    if adapters is not None:
        sizes = replace(sizes, lora=adapters.lora)
    is_remote = found.contents is not None
    return NamedModel(name, folder, sizes, read_state(folder), is_remote, adapters=adapters)


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
    with atomic_folder(folder.parent, folder.name) as building:
        write_model(named, building)
    return named


def write_model(named: NamedModel, folder: Path) -> None:
    """Write a model as transformers loads it, in float32, with its tokenizer.

    Adapters are merged into it. Raises SnapshotError and DataError for what cannot be loaded,
    StoreError for a failed download, and OSError if the folder cannot be written.
    """
    named.tokenizer().save(folder)
    if (generation := named.folder / GENERATION).exists():
        shutil.copyfile(generation, folder / GENERATION)
    model = named.load()
    if named.adapters is not None:
        merge_adapters(model)
    entries = entries_of_weights(model.layout(), WHOLE)
    planned = plan_files(shapes_of(entries), WHOLE, PIECE_BYTES)
    create_files(folder, WHOLE, planned)
    with TensorFiles(folder, planned) as files:
        for part in (part for entry in entries for part in entry.parts()):
            part.write(files)
    write_json(folder / CONFIG, named.sizes.config_json())
