"""What the files of a snapshot must hold, checked before anything is built from them.

A manifest proves that nothing has changed since it was written, not that its author is honest: a
snapshot is untrusted input. So names and shapes are compared with those that the configuration
implies, from the headers alone: no number in a file decides how much memory is used.
"""

from __future__ import annotations

from pathlib import Path

from data.errors import DataError
from data.subwords import load_tokenizer
from data.tokenizer import TOKENIZER_FILES, refuse_larger_than
from data.tokenizer_files import GENERATION
from model.causal_lm import CODE_KEYS
from model.family import ModelConfig
from model.layout import Shape, Stored
from snapshot.config_values import value_of
from snapshot.disk.folder import read_json, readable, verify
from snapshot.disk.load import TensorReader
from snapshot.disk.model import CONFIG, MOMENTS, WHOLE, layout_for, model_of, prefix_of, read_config
from snapshot.disk.state import RunState, read_state
from snapshot.disk.tensors import empty_moments, parts_of_moments, parts_of_weights, shapes_of
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
    moments = empty_moments(layout, value_of(state.config, "optim.name"), "meta")
    with TensorReader(folder, MOMENTS) as reader:
        reader.compare(shapes_of(parts_of_moments(layout, moments)))
    return state


def check_model(folder: Path) -> ModelConfig:
    """As `check_snapshot`, for the files needed for inference. Returns the model's sizes."""
    config = model_of(folder)
    content, where = read_config(folder)
    if code := sorted(key for key in content if key.lstrip("_") in CODE_KEYS):
        raise SnapshotError(f"{where} asks for code of a repo by {code[0]!r}")
    _check_tokenizer(folder, config.vocab_size)
    if (folder / GENERATION).exists() and not isinstance(read_json(folder / GENERATION), dict):
        raise SnapshotError(f"{folder / GENERATION} is not the configuration of generating")
    prefix = prefix_of(folder)
    with TensorReader(folder, prefix) as reader:
        if config.n_layer > (stored := len(reader.files)):
            # Building the layers would take as long as its author likes.
            raise SnapshotError(f"{where} has {config.n_layer:,} layers for {stored} tensors")
        reader.compare(shapes_of(parts_of_weights(layout_for(config), prefix)))
    return config


def check_weights(folder: Path, key: str, config: ModelConfig) -> None:
    """Compare names and shapes in the headers of any model's weights with its configuration's.

    `key` is what names it. Raises SnapshotError, with the name, for a tensor that is missing,
    surplus or of another shape.
    """
    try:
        layout = layout_for(config)
        with TensorReader(folder, WHOLE) as reader:
            shapes, found = reader.shapes(), reader.find(layout)
            for name, parameter in layout.parameters().items():
                if name not in found:
                    raise SnapshotError(f"it lacks {name}")
                there, needed = found[name].shape_of(shapes), tuple(parameter.shape)
                if there != needed:
                    raise SnapshotError(
                        f"{name} has the shape {list(there)}, its config says {list(needed)}"
                    )
            used = {one for stored in found.values() for one in stored.names}
            embedding = found[layout.embedding_name()].names[0]
            for name in shapes.keys() - used:  # constants, or copies of the embedding
                if shapes[name] == shapes[embedding]:
                    _refuse_own_output(reader, name, embedding, shapes[name])
    except SnapshotError as error:
        raise SnapshotError(f"{key}: its weights: {error}.") from error


def _refuse_own_output(reader: TensorReader, output: str, embedding: str, shape: Shape) -> None:
    """Raise SnapshotError for an output layer of its own, although the config ties it."""
    everything = tuple(map(slice, shape))
    own, tied = (reader.read(Stored((name,)), shape, everything) for name in (output, embedding))
    if own.dtype != tied.dtype or not own.equal(tied):
        raise SnapshotError(
            f"{output} differs from {embedding}, to which {CONFIG} ties it. Set "
            "tie_word_embeddings to false there"
        )


def _check_tokenizer(folder: Path, vocab_size: int) -> None:
    """Raise SnapshotError unless the tokenizer can be loaded, and fits the model."""
    with readable(folder):
        for path in (folder / name for name in TOKENIZER_FILES):
            if (size := path.stat().st_size) > LARGEST_TOKENIZER_BYTES:
                raise SnapshotError(f"{path} has {size:,} bytes; no tokenizer is that large")
    try:
        refuse_larger_than(vocab_size, load_tokenizer(folder), str(folder))
    except DataError as error:
        raise SnapshotError(str(error)) from error
