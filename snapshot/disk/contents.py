"""What the files of a snapshot must hold, checked before anything is built from them.

A manifest proves that nothing has changed since it was written, not that its author is honest: a
snapshot is untrusted input. So names, shapes and offsets are compared with those that the
configuration implies, from the headers alone: no number in a file decides how much memory is used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch

from data.errors import DataError
from data.subwords import load_tokenizer
from data.tokenizer import TOKENIZER_FILES
from model.gpt import GPT, GPTConfig
from snapshot.disk.files import MANIFEST, count_json_values, parse_json, read_json
from snapshot.disk.gpt2_layout import gpt2_config, gpt_shape, is_transposed
from snapshot.disk.reading import names_in
from snapshot.errors import SnapshotError

LARGEST_HEADER_BYTES = 4 << 20
MOST_TENSORS = 20_000
"""In one file; a header with 300,000 takes seconds to parse."""
LARGEST_SIZE = 2**24
LARGEST_TOKENIZER_BYTES = 64 << 20
MOST_TOKENIZER_VALUES = 2_500_000
"""In a tokenizer.json of subwords; a vocabulary of 262,144 and its merges are 1.8 million."""
MOMENTS = ("exp_avg", "exp_avg_sq")
METADATA = "__metadata__"

Shape = tuple[int, ...]


def check_contents(folder: Path) -> None:
    """Raise SnapshotError unless a snapshot holds a GPT-2, tokenizer and optimizer, and no more."""
    config = check_model(folder)
    weights = dict(expected_weights(config))
    moments: dict[str, Shape] = {}
    for name, shape in weights.items():
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


def check_model(folder: Path) -> GPTConfig:
    """As `check_contents`, for the files needed for inference. Returns the model's sizes."""
    content = read_json(folder / "config.json")
    shape = gpt_shape(content)
    if additional := sorted(set(content) - set(gpt2_config({**shape, "dropout": 0.0}))):
        raise SnapshotError(f"{folder / 'config.json'} has an unknown entry {additional[0]!r}")
    sizes = [size for size in shape.values() if isinstance(size, int)]
    if not all(1 <= size <= LARGEST_SIZE for size in sizes):
        raise SnapshotError(f"{folder / 'config.json'} has sizes that no model has")
    if shape["n_embd"] % shape["n_head"]:
        raise SnapshotError(f"{folder / 'config.json'} has an n_embd that n_head does not divide")
    if shape["n_layer"] > MOST_TENSORS:
        raise SnapshotError(f"{folder / 'config.json'} has more layers than a file has tensors")
    config = GPTConfig(**shape)
    _check_tokenizer(folder, config.vocab_size)
    _compare(folder, "model", dict(expected_weights(config)))
    return config


def expected_weights(config: GPTConfig) -> Iterator[tuple[str, Shape]]:
    """Name and shape, in GPT-2's layout, of every weight of a model of these sizes."""
    with torch.device("meta"):
        one_block = GPT(GPTConfig(**{**vars(config), "n_layer": 1}))
    for name, parameter in one_block.named_parameters():
        shape = tuple(parameter.shape)[:: -1 if is_transposed(name) else 1]
        copies = config.n_layer if ".h.0." in name else 1
        for i in range(copies):
            yield name.replace(".h.0.", f".h.{i}."), shape


def tensor_files(folder: Path, stem: str) -> list[Path]:
    """The files with the tensors of `stem`, according to the index if there is one.

    Raises SnapshotError if the index is not valid.
    """
    return sorted(set(_file_by_name(folder, stem).values()))


def read_header(path: Path) -> dict[str, Shape]:
    """Names and shapes of the tensors in a safetensors file of float32, in the order of the file.

    Raises SnapshotError if the header is too long, or if sizes, offsets or order do not match the
    file.
    """
    fault = SnapshotError(f"{path} is not a safetensors file of float32, or its header is wrong")
    try:
        size = path.stat().st_size
        with open(path, "rb") as opened:
            beginning = opened.read(8)
            length = struct.unpack("<Q", beginning)[0] if len(beginning) == 8 else size
            if length > size - 8:
                raise fault
            if length > LARGEST_HEADER_BYTES:
                raise SnapshotError(f"{path} has a header of {length:,} bytes: too long")
            header = parse_json(opened.read(length), f"the header of {path}")
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror}") from error
    if not isinstance(header, dict) or header.pop(METADATA, {"format": "pt"}) != {"format": "pt"}:
        raise fault
    if len(header) > MOST_TENSORS:
        raise SnapshotError(f"{path} has {len(header):,} tensors: too many")
    if not all(_is_entry(entry) for entry in header.values()):
        raise fault
    expected_begin = 0
    in_order = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    for _, entry in in_order:
        begin, end = entry["data_offsets"]
        if begin != expected_begin or end - begin != 4 * prod(entry["shape"]):
            raise fault
        expected_begin = end
    if expected_begin != size - 8 - length:
        raise fault
    return {name: tuple(entry["shape"]) for name, entry in in_order}


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and set(entry) == {"dtype", "shape", "data_offsets"}
        and entry["dtype"] == "F32"
        and _are_sizes(entry["shape"], most=4)
        and _are_sizes(entry["data_offsets"], most=2)
        and len(entry["data_offsets"]) == 2
    )


def _are_sizes(numbers: Any, most: int) -> bool:
    return (
        isinstance(numbers, list)
        and len(numbers) <= most
        and all(type(number) is int and 0 <= number < 2**63 for number in numbers)
    )


def _compare(folder: Path, stem: str, expected: dict[str, Shape]) -> None:
    """Raise SnapshotError unless the files of a stem hold exactly the expected tensors."""
    file_of = _file_by_name(folder, stem)
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


def _file_by_name(folder: Path, stem: str) -> dict[str, Path]:
    """The file of each tensor; without an index, the only file, under the name ""."""
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    pieces = set(folder.glob(f"{stem}*.safetensors"))
    if pieces == {single} and not index.exists():
        return {"": single}
    content = read_json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise SnapshotError(f"{index} is not an index")
    paths = {file: folder / file for file in set(names.values())}
    for file in paths:
        if Path(file).name != file:
            raise SnapshotError(f"{index} leads outside, to {file!r}")
    if set(paths.values()) != pieces:
        raise SnapshotError(f"{index} names other files than exist")
    return {name: paths[file] for name, file in names.items()}


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
    # The embedding of a pretrained model may have more rows than its tokenizer has tokens.
    if size > vocab_size or (size < vocab_size and not subwords):
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
