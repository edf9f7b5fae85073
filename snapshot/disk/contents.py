"""What the files of a snapshot must hold, checked before anything is built from them.

A manifest proves that nothing has changed since it was written, not that its author is honest: a
snapshot is untrusted input. So names, shapes and offsets are compared with those that the
configuration implies, from the headers alone: no number in a file decides how much memory is used.
"""

from __future__ import annotations

from pathlib import Path

from data.errors import DataError
from data.tokenizer import TOKENIZER_FILES, CharTokenizer
from model.causal_lm import ModelConfig
from model.gpt import GPTConfig
from snapshot.disk.architecture import config_json, layout_for, model_config
from snapshot.disk.files import MANIFEST, read_json
from snapshot.disk.headers import file_by_name, read_header, tensor_files
from snapshot.disk.layout import Layout, Shape
from snapshot.disk.reading import names_in
from snapshot.errors import SnapshotError

MOMENTS = ("exp_avg", "exp_avg_sq")


def check_contents(folder: Path) -> None:
    """Raise SnapshotError unless a snapshot holds a model, tokenizer and optimizer, and no more."""
    layout = layout_for(check_model(folder))
    moments: dict[str, Shape] = {}
    for name, parameter in layout.parameters().items():
        shape = tuple(parameter.shape)[:: -1 if layout.is_transposed(name) else 1]
        moments |= {f"{name}.{moment}": shape for moment in MOMENTS}
        moments[f"{name}.step"] = ()
    _compare(folder, "optimizer", moments)
    known = {"state.json", "config.json", *TOKENIZER_FILES, MANIFEST}
    for stem in ("model", "optimizer"):
        known |= {path.name for path in tensor_files(folder, stem)} | {
            f"{stem}.safetensors.index.json"
        }
    if additional := sorted(names_in(folder) - known):
        raise SnapshotError(f"{folder} holds {additional[0]}, which no snapshot has")


def check_model(folder: Path) -> ModelConfig:
    """As `check_contents`, for the files needed for inference. Returns the model's sizes."""
    path = folder / "config.json"
    content = read_json(path)
    config = model_config(content, str(path))
    known = set(config_json(config)) if isinstance(config, GPTConfig) else set(content)
    if additional := sorted(set(content) - known):
        raise SnapshotError(f"{path} has an unknown entry {additional[0]!r}")
    size = _check_tokenizer(folder)
    if size > config.vocab_size:  # a model of the Hub may have more rows than tokens
        raise SnapshotError(
            f"{folder}: the tokenizer has {size} characters, not {config.vocab_size}"
        )
    stored = sum(len(read_header(file)) for file in tensor_files(folder, "model"))
    if config.n_layer > stored:  # or building the layers would take as long as its author likes
        raise SnapshotError(f"{path} has {config.n_layer:,} layers, and the files {stored} tensors")
    _compare(folder, "model", expected_weights(layout_for(config)))
    return config


def expected_weights(layout: Layout) -> dict[str, Shape]:
    """Name and shape, as in the files, of every weight of a model."""
    return {name: shape for group in layout.written() for name, shape in group.shapes.items()}


def _compare(folder: Path, stem: str, expected: dict[str, Shape]) -> None:
    """Raise SnapshotError unless the files of a stem hold exactly the expected tensors."""
    file_of = file_by_name(folder, stem)
    for path in sorted(set(file_of.values())):
        for name, shape in read_header(path).items():
            if name not in expected:
                raise SnapshotError(f"{path} holds {name!r}, which the model does not have")
            if file_of.get(name, file_of.get("")) != path:
                raise SnapshotError(f"{path} holds {name!r}, which the index has in another file")
            if expected.pop(name) != shape:
                raise SnapshotError(f"{path} has {name!r} in another shape than the model's")
    if expected:
        raise SnapshotError(f"{folder} lacks {next(iter(expected))!r} of the {stem}")


def _check_tokenizer(folder: Path) -> int:
    """The size of the vocabulary. Raises SnapshotError if the tokenizer's files are not valid."""
    known: tuple[set[str], ...] = ({"tokenizer_class", "clean_up_tokenization_spaces"}, set())
    for name, keys in zip(TOKENIZER_FILES[1:], known, strict=True):
        content = read_json(folder / name)
        if not isinstance(content, dict) or not set(content) <= keys:
            raise SnapshotError(f"{folder / name} has entries that no tokenizer here needs")
    read_json(folder / TOKENIZER_FILES[0])  # raises if it is too large
    try:
        return CharTokenizer.load(folder).vocab_size
    except DataError as error:
        raise SnapshotError(str(error)) from error
