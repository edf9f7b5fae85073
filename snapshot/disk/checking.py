"""What the files of a snapshot must hold, checked before anything is built from them.

A manifest proves that nothing has changed since it was written, not that its author is honest: a
snapshot is untrusted input. So names, shapes and offsets are compared with those that the
configuration implies, from the headers alone: no number in a file decides how much memory is used.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.subwords import load_tokenizer
from data.tokenizer import TOKENIZER_FILES
from data.tokenizer_files import END_ID, GENERATION, model_settings
from model.family import ModelConfig
from model.layout import Layout, Shape
from snapshot.config_values import value_of
from snapshot.disk.files import MANIFEST, count_json_values, names_in, read_json, verify
from snapshot.disk.model import (
    ADAPTER_CONFIG,
    CONFIG,
    layout_for,
    model_config,
    prefix_of,
    read_adapters,
    read_config,
    trains_adapters,
)
from snapshot.disk.numbers import NumberChecks
from snapshot.disk.reading import file_by_name, files_of, read_header
from snapshot.disk.shards import kept_in, written_as
from snapshot.disk.state import STATE, RunState, read_state
from snapshot.errors import SnapshotError

LARGEST_TOKENIZER_BYTES = 64 << 20
MOST_TOKENIZER_VALUES = 2_500_000
"""In a tokenizer.json of subwords; a vocabulary of 262,144 and its merges are 1.8 million."""
IDS = ("bos_token_id", END_ID, "pad_token_id")
SWITCHES = ("do_sample",)
NUMBERS = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty"),
    *("no_repeat_ngram_size", "max_length", "max_new_tokens"),
)
MOST_ENDS = 1_000


def check_contents(folder: Path, config: dict[str, Any]) -> None:
    """Raise SnapshotError unless a snapshot holds a model, tokenizer and optimizer, and no more.

    They must be those that a run with the configuration in its state.json writes.
    """
    layout = layout_for(check_model(folder))
    layout.freeze(frozen_in(config))
    _check_what_is_saved(folder, config)
    kept = {
        f"{name}.{key}": shape[:: -1 if layout.is_transposed(name) else 1]
        for name, shapes in kept_in(layout, value_of(config, "optim.name")).items()
        for key, shape in shapes.items()
    }
    _compare(folder, "optimizer", kept)
    own = ADAPTER_CONFIG if trains_adapters(config) else CONFIG
    known = {STATE, own, *TOKENIZER_FILES, GENERATION, MANIFEST}
    for prefix in (prefix_of(folder), "optimizer"):
        known |= {path.name for path in files_of(folder, prefix)} | {
            f"{prefix}.safetensors.index.json"
        }
    if additional := sorted(names_in(folder) - known):
        raise SnapshotError(f"{folder} holds {additional[0]}, which no snapshot has")


def _check_what_is_saved(folder: Path, config: dict[str, Any]) -> None:
    """Raise SnapshotError unless all weights or adapters are there, as configured."""
    adapters = read_adapters(folder)
    if (adapters is not None) != trains_adapters(config):
        raise SnapshotError(f"{folder} holds other weights than its {STATE} says")
    if adapters is None:
        return
    lora = adapters.lora
    alpha = value_of(config, "model.lora_alpha") or 2 * lora.rank
    if lora.rank != value_of(config, "model.lora_rank") or lora.alpha != alpha:
        raise SnapshotError(f"{folder} has other adapters than its {STATE} says")
    targets = value_of(config, "model.lora_targets")
    is_list = isinstance(targets, list)
    if targets and (not is_list or sorted(map(str, targets)) != list(lora.targets)):
        raise SnapshotError(f"{folder} has adapters of other layers than its {STATE} says")


def check_model(folder: Path) -> ModelConfig:
    """As `check_contents`, for the files needed for inference. Returns the model's sizes."""
    adapters = read_adapters(folder)
    content, where = read_config(folder)
    config = model_config(content, where)
    if additional := sorted(config.unknown_entries(content)):
        raise SnapshotError(f"{where} has an unknown entry {additional[0]!r}")
    _check_tokenizer(folder, config.vocab_size)
    check_generation(folder)
    prefix = prefix_of(folder)
    stored = sum(len(read_header(file)) for file in files_of(folder, prefix))
    if config.n_layer > stored:  # building the layers would take as long as its author likes
        raise SnapshotError(
            f"{where} has {config.n_layer:,} layers, and the files {stored} tensors"
        )
    config = replace(config, lora=None if adapters is None else adapters.lora)
    _compare(folder, prefix, expected_weights(layout_for(config), prefix))
    return config


def frozen_in(config: dict[str, Any]) -> list[str]:
    """The patterns of optim.freeze in the configuration of a snapshot, which is untrusted input."""
    found = config.get("optim", {}) if isinstance(config, dict) else {}
    patterns = found.get("freeze", []) if isinstance(found, dict) else []
    return [one for one in patterns if isinstance(one, str)] if isinstance(patterns, list) else []


def expected_weights(layout: Layout, prefix: str) -> dict[str, Shape]:
    """Name and shape, as in the files of a prefix, of every weight in them."""
    groups = written_as(layout, prefix)
    return {name: shape for group in groups for name, shape in group.shapes.items()}


def _compare(folder: Path, prefix: str, expected: dict[str, Shape]) -> None:
    """Raise SnapshotError unless the files of a prefix hold exactly the expected tensors."""
    file_of = file_by_name(folder, prefix)
    for path in sorted(set(file_of.values())):
        for name, shape in read_header(path).items():
            if name not in expected:
                raise SnapshotError(f"{path} holds {name!r}, which the model does not have")
            if file_of.get(name, file_of.get("")) != path:
                raise SnapshotError(f"{path} holds {name!r}, which the index has in another file")
            if expected.pop(name) != shape:
                raise SnapshotError(f"{path} has {name!r} in another shape than the model's")
    if expected:
        raise SnapshotError(f"{folder} lacks {next(iter(expected))!r} of the {prefix}")


def _check_tokenizer(folder: Path, vocab_size: int) -> None:
    """Raise SnapshotError unless the tokenizer is one that this project saves, and fits the model.

    What a tokenizer_config.json may say is checked where it is loaded; it names no code.
    """
    if read_json(folder / TOKENIZER_FILES[2]) != {}:
        raise SnapshotError(
            f"{folder / TOKENIZER_FILES[2]} has entries that no tokenizer here needs"
        )
    settings = read_json(folder / TOKENIZER_FILES[1])
    known = {"tokenizer_class", "clean_up_tokenization_spaces"}
    subwords = isinstance(settings, dict) and "eos_token" in settings
    if not subwords and (not isinstance(settings, dict) or not set(settings) <= known):
        raise SnapshotError(
            f"{folder / TOKENIZER_FILES[1]} has entries that no tokenizer here needs"
        )
    path = folder / TOKENIZER_FILES[0]
    if subwords:
        _check_size_of_subwords(path)
    else:
        read_json(path)  # raises if it is too large
    try:
        tokenizer = load_tokenizer(folder)
    except DataError as error:
        raise SnapshotError(str(error)) from error
    size = tokenizer.vocab_size
    if size > vocab_size:  # a model of the Hub may have more rows than its tokenizer has tokens
        raise SnapshotError(
            f"{folder}: the tokenizer has {size} {tokenizer.unit}s, not {vocab_size}"
        )


def _check_size_of_subwords(path: Path) -> None:
    """Raise SnapshotError before a tokenizer.json of subwords can fill the memory."""
    try:
        size = path.stat().st_size
        if size > LARGEST_TOKENIZER_BYTES:
            raise SnapshotError(f"{path} has {size:,} bytes; no tokenizer is that large")
        if count_json_values(path.read_bytes()) > MOST_TOKENIZER_VALUES:
            raise SnapshotError(f"{path} holds more values than any tokenizer")
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror}") from error


def generation_of(folder: Path | None, stops: Collection[int]) -> dict[str, Any]:
    """The generation_config.json of a run that began from the model in `folder`; empty: none.

    `stops` are tokens that end a reply as well, if the run trains on conversations. Where the model
    has no generation_config.json, the ids in its config.json hold, which such a file would replace.
    """
    content = {} if folder is None else model_settings(folder, GENERATION)
    if stops and folder is not None and not (folder / GENERATION).exists():
        entries = model_settings(folder, CONFIG)
        content = {key: entries[key] for key in IDS if key in entries}
    kept = {key: value for key, value in content.items() if _is_valid(key, value)}
    if stops:
        ends = kept.get(END_ID, [])
        both = [*(ends if isinstance(ends, list) else [ends]), *sorted(stops)]
        kept[END_ID] = list(dict.fromkeys(both))
    return kept


def check_generation(folder: Path) -> None:
    """Raise SnapshotError for a generation_config.json that `generation_of` does not make."""
    path = folder / GENERATION
    if not path.exists():
        return
    content = read_json(path)
    if not isinstance(content, dict):
        raise SnapshotError(f"{path} is not the configuration of generating")
    for key, value in content.items():
        if not _is_valid(key, value):
            raise SnapshotError(f"{path} has an entry {key!r} that no snapshot has")


def _is_valid(key: str, value: Any) -> bool:
    if key in IDS:
        ids = value if isinstance(value, list) and key == END_ID else [value]
        return len(ids) <= MOST_ENDS and all(type(one) is int and 0 <= one < 2**31 for one in ids)
    if key in NUMBERS:
        return type(value) in (int, float) and abs(value) < 2**31 and math.isfinite(value)
    return key in SWITCHES and isinstance(value, bool)


def check_snapshot(folder: Path) -> RunState:
    """Verify a whole snapshot, hashes and contents; its state. Raises SnapshotError."""
    numbers = NumberChecks()
    verify(folder, read=numbers.read)
    state = read_state(folder)
    check_contents(folder, state.config)
    numbers.check_updates(folder, state.step, state.skipped_steps)
    return state
