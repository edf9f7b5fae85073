"""A whole model from a snapshot that holds only what was trained, and from its base."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from data.special_tokens import GENERATION
from data.tokenizer import TOKENIZER_FILES
from model.causal_lm import LanguageModel
from model.lora import merge_adapters
from snapshot.disk.architecture import config_json, layout_of
from snapshot.disk.entries import shapes_of, weight_entries, whole_parts
from snapshot.disk.files import write_json
from snapshot.disk.placing import place_tensors
from snapshot.disk.reference import CONFIG, WHOLE
from snapshot.disk.tensor_files import TensorFiles, create_files
from snapshot.disk.writing import atomic_folder
from snapshot.errors import SnapshotError
from snapshot.named_model import NamedModel, find_model

PIECE_BYTES = 2_000_000_000
"""Bytes of the largest file, as in a snapshot."""


def merge(source: str, folder: Path, base: str | None = None) -> NamedModel:
    """Write the model to a new folder, which transformers loads and `model.pretrained` takes.

    `base` is as for `find_model`. The weights are float32. Raises SnapshotError for a snapshot that
    is whole and for a folder that exists, HubError if something cannot be downloaded, OSError if
    the folder cannot be written.
    """
    named = find_model(source, base)
    if named.reference is None:
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
    if named.reference is not None and named.reference.lora is not None:
        merge_adapters(model)
    entries = weight_entries(layout_of(model), WHOLE)
    placements = {WHOLE: place_tensors(shapes_of(entries), WHOLE, piece_bytes)}
    create_files(folder, placements)
    with TensorFiles(folder, placements, maps=True) as files:
        for part in whole_parts(entries):
            part.write(files)
    write_json(folder / CONFIG, config_json(named.sizes))
