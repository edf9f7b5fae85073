"""What the files of a snapshot must hold, checked before anything is built from them.

A manifest proves that nothing has changed since it was written, not that its author is honest: a
snapshot is untrusted input. So names, shapes and offsets are compared with those that the
configuration implies, from the headers alone: no number in a file decides how much memory is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.subwords import load_tokenizer
from data.tokenizer import FIXED_SETTINGS, TOKENIZER_FILES
from data.tokenizer_files import GENERATION
from model.family import ModelConfig
from model.layout import Shape
from optim.optimizers import STEP
from snapshot.config_values import value_of
from snapshot.disk.folder import read_json, readable, verify
from snapshot.disk.load import TensorReader, file_by_name
from snapshot.disk.model import (
    layout_for,
    model_of,
    prefix_of,
    read_adapters,
    read_config,
)
from snapshot.disk.state import STATE, RunState, read_state
from snapshot.disk.tensors import kept_in, written_as, wrong_counts
from snapshot.errors import SnapshotError

LARGEST_TOKENIZER_BYTES = 64 << 20


def check_snapshot(folder: Path) -> RunState:
    """Verify a whole snapshot, hashes and contents; its state. Raises SnapshotError."""
    verify(folder)
    state = read_state(folder)
    layout = layout_for(check_model(folder))
    patterns = value_of(state.config, "optim.freeze")
    if isinstance(patterns, list):
        layout.freeze([one for one in patterns if isinstance(one, str)])
    _check_what_is_saved(folder, state.config)
    optimizer = value_of(state.config, "optim.name")
    kept = {
        f"{name}.{key}": shape[:: -1 if layout.is_transposed(name) else 1]
        for name, shapes in kept_in(layout, optimizer).items()
        for key, shape in shapes.items()
    }
    _compare(folder, "optimizer", kept)
    _check_counts(folder, kept, state)
    return state


def _check_counts(folder: Path, kept: Iterable[str], state: RunState) -> None:
    """Raise SnapshotError unless the optimizer has counted an update of all parameters a step."""
    with TensorReader(folder, "optimizer") as reader:
        counted = {float(reader.slice_of(name)[...]) for name in kept if name.endswith(f".{STEP}")}
    for wrong in wrong_counts(counted, state.step, state.skipped_steps):
        raise SnapshotError(
            f"{folder} is of step {state.step}, but its optimizer has counted {wrong:g} updates"
        )
    if len(counted) > 1:
        raise SnapshotError(f"{folder}: not all weights have the same number of updates")


def _check_what_is_saved(folder: Path, config: dict[str, Any]) -> None:
    """Raise SnapshotError unless all weights or adapters are there, as configured."""
    adapters, rank = read_adapters(folder), value_of(config, "model.lora_rank")
    lora = None if adapters is None else adapters.lora
    is_right = (lora is None) == (rank is None)
    if lora is not None:
        alpha, targets = (value_of(config, f"model.lora_{key}") for key in ("alpha", "targets"))
        is_right = is_right and (lora.rank, lora.alpha) == (rank, alpha or 2 * lora.rank)
        named = sorted(map(str, targets)) if isinstance(targets, list) else targets
        is_right = is_right and (not targets or named == list(lora.targets))
    if not is_right:
        raise SnapshotError(f"{folder} holds other weights or adapters than its {STATE} says")


def check_model(folder: Path) -> ModelConfig:
    """As `check_snapshot`, for the files needed for inference. Returns the model's sizes."""
    config, _ = model_of(folder)
    content, where = read_config(folder)
    if additional := sorted(config.unknown_entries(content)):
        raise SnapshotError(f"{where} has an unknown entry {additional[0]!r}")
    _check_tokenizer(folder, config.vocab_size)
    if (folder / GENERATION).exists() and not isinstance(read_json(folder / GENERATION), dict):
        raise SnapshotError(f"{folder / GENERATION} is not the configuration of generating")
    prefix = prefix_of(folder)
    with TensorReader(folder, prefix) as reader:
        stored = len(reader.files)
    if config.n_layer > stored:  # building the layers would take as long as its author likes
        raise SnapshotError(
            f"{where} has {config.n_layer:,} layers, and the files {stored} tensors"
        )
    weights = written_as(layout_for(config), prefix)
    _compare(folder, prefix, {name: shape for one in weights for name, shape in one.shapes.items()})
    return config


def _compare(folder: Path, prefix: str, expected: dict[str, Shape]) -> None:
    """Raise SnapshotError unless the files of a prefix hold exactly the expected tensors."""
    listed = file_by_name(folder, prefix)
    with TensorReader(folder, prefix) as reader:
        shapes = reader.shapes(("F32",))
        for path, metadata in reader.metadata.items():
            if metadata != {"format": "pt"}:  # which transformers looks at
                raise SnapshotError(f"{path} has other metadata than a snapshot's files")
        for name, path in reader.files.items():
            if name not in expected:
                raise SnapshotError(f"{path} holds {name!r}, which the model does not have")
            if listed.get(name, listed.get("")) != path:
                raise SnapshotError(f"{path} holds {name!r}, which the index has in another file")
            if shapes.get(name) != expected[name]:
                raise SnapshotError(f"{path} has {name!r} in another shape than the model's")
    if missing := next((name for name in expected if name not in shapes), None):
        raise SnapshotError(f"{folder} lacks {missing!r} of the {prefix}")


def _check_tokenizer(folder: Path, vocab_size: int) -> None:
    """Raise SnapshotError unless the tokenizer is one that this project saves, and fits the model.

    What a tokenizer_config.json may say is checked where it is loaded; it names no code.
    """
    path, settings_path, map_path = (folder / name for name in TOKENIZER_FILES)
    with readable(path):
        if (size := path.stat().st_size) > LARGEST_TOKENIZER_BYTES:
            raise SnapshotError(f"{path} has {size:,} bytes; no tokenizer is that large")
    settings = read_json(settings_path)
    has_subwords = isinstance(settings, dict) and "eos_token" in settings
    for is_known, file in (
        (read_json(map_path) == {}, map_path),
        (has_subwords or settings == FIXED_SETTINGS, settings_path),
    ):
        if not is_known:
            raise SnapshotError(f"{file} has entries that no tokenizer here needs")
    if not has_subwords:
        read_json(path)  # raises if it is too large
    try:
        tokenizer = load_tokenizer(folder)
    except DataError as error:
        raise SnapshotError(str(error)) from error
    if (size := tokenizer.vocab_size) > vocab_size:  # a model may have more rows than tokens
        raise SnapshotError(
            f"{folder}: the tokenizer has {size} {tokenizer.unit}s, not {vocab_size}"
        )
