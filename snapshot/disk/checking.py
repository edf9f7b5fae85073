"""What the files of a snapshot must hold, checked before anything is built from them.

A manifest proves that nothing has changed since it was written, not that its author is honest: a
snapshot is untrusted input. So names and shapes are compared with those that the configuration
implies, from the headers alone: no number in a file decides how much memory is used.
"""

from __future__ import annotations

from pathlib import Path

from data.errors import DataError
from data.subwords import load_tokenizer
from data.tokenizer import FIXED_SETTINGS, TOKENIZER_FILES
from data.tokenizer_files import GENERATION
from model.causal_lm import CODE_KEYS
from model.family import ModelConfig
from model.layout import Shape
from snapshot.config_values import value_of
from snapshot.disk.folder import read_json, readable, verify
from snapshot.disk.load import TensorReader
from snapshot.disk.model import layout_for, model_of, prefix_of, read_config
from snapshot.disk.state import RunState, read_state
from snapshot.disk.tensors import kept_in, written_as
from snapshot.errors import SnapshotError

LARGEST_TOKENIZER_BYTES = 64 << 20


def check_snapshot(folder: Path) -> RunState:
    """Verify a whole snapshot, hashes and contents; its state. Raises SnapshotError."""
    verify(folder)
    return check_contents(folder)


def check_contents(folder: Path) -> RunState:
    """As `check_snapshot`, for files whose hashes are known to be right."""
    state = read_state(folder)
    sizes = check_model(folder)
    if (sizes.lora is None) != (value_of(state.config, "model.lora_rank") is None):
        raise SnapshotError(f"{folder} holds adapters, or the whole model, unlike its run")
    layout = layout_for(sizes)
    patterns = value_of(state.config, "optim.freeze")
    if isinstance(patterns, list):
        layout.freeze([one for one in patterns if isinstance(one, str)])
    kept = {
        f"{name}.{key}": shape[:: -1 if layout.is_transposed(name) else 1]
        for name, shapes in kept_in(layout, value_of(state.config, "optim.name")).items()
        for key, shape in shapes.items()
    }
    _compare(folder, "optimizer", kept)
    return state


def check_model(folder: Path) -> ModelConfig:
    """As `check_snapshot`, for the files needed for inference. Returns the model's sizes."""
    config, _ = model_of(folder)
    content, where = read_config(folder)
    if code := sorted(content.keys() & CODE_KEYS):
        raise SnapshotError(f"{where} asks for code of a repo by {code[0]!r}")
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
    with TensorReader(folder, prefix) as reader:
        shapes = reader.shapes(("F32",))
        for name, path in reader.files.items():
            if name not in expected:
                raise SnapshotError(f"{path} holds {name!r}, which the model does not have")
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
    if read_json(map_path) != {} or not (has_subwords or settings == FIXED_SETTINGS):
        raise SnapshotError(
            f"{map_path.name} or {settings_path} has entries that no tokenizer here needs"
        )
    try:
        tokenizer = load_tokenizer(folder)
    except DataError as error:
        raise SnapshotError(str(error)) from error
    if (size := tokenizer.vocab_size) > vocab_size:  # a model may have more rows than tokens
        raise SnapshotError(
            f"{folder}: the tokenizer has {size} {tokenizer.unit}s, not {vocab_size}"
        )
