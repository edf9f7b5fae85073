"""The model that a command line names: a run's, with its state, or any other; its whole copy."""

from __future__ import annotations

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
from snapshot.disk.folder import MANIFEST, write_json
from snapshot.disk.load import restore_weights
from snapshot.disk.model import ADAPTERS, CONFIG, WHOLE, Adapters, model_of
from snapshot.disk.state import RunState, read_state
from snapshot.disk.tensor_files import create_files, plan_files
from snapshot.disk.tensors import parts_of_weights, shapes_of
from snapshot.errors import SnapshotError
from snapshot.source import TIMEOUT_SECONDS, find
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
    weights: Base | None
    """Where its weights are; None for adapters, whose base is looked for when it is loaded."""
    state: RunState | None = None
    """The state of the run that it is a snapshot of; None for any other model."""
    from_store: bool = False
    """Whether somebody else may have written `state`."""
    adapters: Adapters | None = None
    """What its snapshot holds, if that is not the whole model."""
    base_name: str | None = None
    """Where their base is now, if they do not lead there."""

    def load(self) -> LanguageModel:
        """The model with its weights, on the CPU. Raises SnapshotError and StoreError."""
        weights = self.weights
        if weights is None:
            assert self.adapters is not None
            digest = None if self.state is None else self.state.base_digest
            weights = open_base_of(
                self.adapters, digest, self.folder, TIMEOUT_SECONDS, self.base_name
            )
        weights.fetch_weights()
        check_weights(weights, replace(self.sizes, lora=None))  # before a model is built
        model = build_empty(self.sizes)
        restore_weights(weights.folder, model)
        if self.adapters is not None:
            restore_weights(self.folder, model, ADAPTERS)
        return model

    def tokenizer(self) -> Tokenizer:
        """Its tokenizer. Raises DataError for one with more tokens than the model has."""
        tokenizer = tokenizer_of(self.folder)
        refuse_larger_than(self.sizes.vocab_size, tokenizer, str(self.folder))
        return tokenizer


def find_model(name: str, base: str | None = None) -> NamedModel:
    """The newest whole snapshot of a run or a store, a snapshot, or any other model, by its name.

    `base` is where the base of adapters is. Raises SnapshotError for what is none of these, and
    StoreError if a store cannot be reached.
    """
    source, key = find(name, any_model=True), f"model={name}"
    is_folder, names = source.contents is None, source.names()
    # A folder without config.json is no model: `fetch` says what is wrong.
    if source.is_run or (is_folder and (MANIFEST in names or CONFIG not in names)):
        found = source.fetch(wanted=INFERENCE)
        folder, (sizes, adapters) = found.path, model_of(found.path)
        weights = Base(key, folder) if adapters is None else None
        named = NamedModel(
            found.name, folder, sizes, weights, read_state(folder), not is_folder, adapters, base
        )
    else:
        other = base_of(key, source)
        sizes = other.config(dropout=0.0, activation_checkpointing=False)
        named = NamedModel(other.name, other.folder, sizes, other)
    if base is not None and named.adapters is None:
        raise SnapshotError(f"--base {base}: {named.name} holds its own weights. Leave it out.")
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
    parts = parts_of_weights(model.layout(), WHOLE)
    files = plan_files(shapes_of(parts), WHOLE, PIECE_BYTES)
    create_files(folder, WHOLE, files)
    file_of = {name: file for file in files for name in file.shapes}
    for part in parts:
        part.write(folder, file_of)
    write_json(folder / CONFIG, model.config.config_json())
