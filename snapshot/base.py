"""The model that a run begins from: a repo of the Hub, a folder, or another run's snapshot.

All of it is untrusted input. The small files, configuration and tokenizer, are read first; the
weights follow when nothing else is wrong. Snapshots of adapters name the base that they need.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub  # imports the rest at its first use

from common.retries import with_retries
from data.tokenizer import TOKENIZER_FILES, lacks_file
from model.families import ARCHITECTURES
from model.family import ModelConfig
from snapshot.disk.folder import expanded, readable, visible
from snapshot.disk.load import TensorReader, files_of
from snapshot.disk.model import (
    ADAPTER_CONFIG,
    CONFIG,
    WHOLE,
    Adapters,
    layout_for,
    model_config,
    read_config,
)
from snapshot.errors import SnapshotError
from snapshot.source import WEIGHTS, Source, find, naming
from store.fetch import INFERENCE, SMALL, fetch
from store.latest import SNAPSHOTS
from store.store import PREFIX

EXACT = re.compile(rf"[0-9a-f]{{7,40}}|{SNAPSHOTS}/.+")
"""The part of a name that can mean only one commit or snapshot."""
SAMPLES, SAMPLE_BYTES = 64, 4096
"""Of each file with weights, in the digest of a base."""


@dataclass(frozen=True)
class Base:
    """A model whose configuration and tokenizer are on this disk."""

    key: str
    """The configuration key and value that name it, for messages."""
    name: str
    """The folder, or the store and its commit or snapshot."""
    folder: Path
    """Where config.json and the tokenizer lie, and the weights once they are there."""
    place: str = ""
    """The name by which another machine finds the same; empty for a folder."""
    published: tuple[str, str | None] | None = None
    """How adapters name it: a repo and its commit, or `place`; None for a folder."""
    download: Callable[[], object] = lambda: None
    """Downloads the weights and verifies them."""
    of_text: Mapping[str, Any] = field(default_factory=dict)
    """What is null in a config.json without a vocabulary: that, the context, the end of a text."""

    def on_text(self, vocabulary: int, context: int, end_of_text: int | None = None) -> Base:
        """The model for a text, whose sizes it has where its config.json leaves them open: null."""
        sizes = {"vocab_size": vocabulary, "max_position_embeddings": context}
        return replace(self, of_text={**sizes, "eos_token_id": end_of_text})

    def config(self, dropout: float, activation_checkpointing: bool | str) -> ModelConfig:
        """The sizes of the model. Raises SnapshotError if it cannot be built here."""
        content, _ = read_config(self.folder)
        if isinstance(content, dict) and content.get("vocab_size", ...) is None:
            if not self.of_text:
                raise SnapshotError(
                    f"{self.key}: its {CONFIG} leaves vocab_size to the text, so the model has no "
                    "size yet. Set it there, or train a new model with an optim.learning_rate."
                )
            is_open = [key for key in self.of_text if content.get(key) is None]
            content = {**content, **{key: self.of_text[key] for key in is_open}}
        return model_config(content, f"{self.key}: its {CONFIG}", dropout, activation_checkpointing)

    def parameters(self) -> int:
        """Numbers in its parameters, without an untied output layer. Raises SnapshotError."""
        sizes = self.config(dropout=0.0, activation_checkpointing=False)
        return layout_for(sizes).size_without_output()

    def fetch_weights(self, here: bool = True) -> Path:
        """Download the weights and verify their hashes; the folder with them.

        Without `here` another process of this machine has done it. Raises SnapshotError if they are
        not what they must be, StoreError for a failed download.
        """
        if here:
            with naming(self.key):
                self.download()
        return self.folder


def open_base(key: str, value: str, timeout: float, with_weights: bool = True) -> Base:
    """Find the model that `key=value` names, and download its small files if it is in a store.

    The architecture of a preset is this project's, whatever there is of that name elsewhere.
    Raises SnapshotError for what is no such model, StoreError if its store cannot be reached.
    """
    named = f"{key}={value}"
    own = ARCHITECTURES.get(value) if key == "model.architecture" else None
    with naming(named):
        source = Source(str(own), own) if own else find(value, timeout, any_model=True)
        return base_of(named, source, with_weights)


def open_tokenizer(value: str, timeout: float) -> Path:
    """Download the tokenizer that `data.tokenizer` names; its folder.

    Raises SnapshotError if there is none, StoreError if its store cannot be reached.
    """
    named = f"data.tokenizer={value}"
    with naming(named):
        source = find(value, timeout, any_model=True)
        contents = None if source.is_run else source.contents
        if contents is not None and TOKENIZER_FILES[0] not in contents.files:
            raise SnapshotError(lacks_file(named, contents.store.name))
        return source.fetch_model(SMALL).path


def base_of(named: str, source: Source, with_weights: bool = True) -> Base:
    """The model in a source, whose small files are downloaded; `named` begins each message.

    Raises SnapshotError for what is no model, StoreError for a failed download.
    """
    is_run = source.is_run
    if source.contents is not None and not is_run:  # there may be nothing to download
        _refuse_other_files(named, source.contents.files, with_weights)
    found = source.fetch_model(SMALL)
    folder, contents = found.path, found.contents
    if contents is None or is_run:
        with readable(folder):
            names = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
        _refuse_other_files(named, names, with_weights and not is_run)
    if contents is None:
        return Base(named, str(folder), folder)
    work: Callable[[], object] = partial(source.fetch_model, INFERENCE)
    if is_run:  # that snapshot, whatever the run uploads meanwhile
        work = partial(with_retries, partial(fetch, contents, found.folder, None, INFERENCE))
    place, commit = contents.pinned(found.folder).rstrip("@"), contents.commit
    is_commit = commit and place.endswith(f"@{commit}")
    if is_commit:
        repo = contents.store.name
        return Base(named, f"{repo}@{commit[:12]}", folder, place, (repo, commit), work)
    return Base(named, place, folder, place, (place, None), work)


def _refuse_other_files(named: str, names: Collection[str], with_weights: bool) -> None:
    """Raise SnapshotError unless there are a config.json and, `with_weights`, safetensors."""
    if CONFIG not in names and ADAPTER_CONFIG in names:
        raise SnapshotError(
            f"{named} holds adapters and not their base. Merge the two, with `python -m snapshot "
            "merge <name> <folder>` for a run of this project, and with peft's merge_and_unload "
            "for another, and name the result."
        )
    if CONFIG not in names:
        what = "it is neither a model nor a run with snapshots"
        raise SnapshotError(f"{named} has no {CONFIG}: {what}. Check the name.")
    if with_weights and not any(WEIGHTS.fullmatch(name) for name in names):
        raise SnapshotError(
            f"{named} has no weights as safetensors. Files of other kinds can execute code, or are "
            "quantized, and are not read. Name a repo or a revision with model.safetensors (many "
            "have one at refs/pr/..., converted by the Hub), or save the model with transformers' "
            "save_pretrained."
        )


def check_weights(base: Base, config: ModelConfig) -> None:
    """Compare names and shapes in the headers of the weights with the model's.

    Raises SnapshotError, with the name, for a tensor that is missing, surplus or of another shape.
    """
    try:
        layout = layout_for(config)
        with TensorReader(base.folder, WHOLE) as reader:
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
                    _refuse_own_output(reader, name, embedding)
    except SnapshotError as error:
        files = ", ".join(sorted(path.name for path in files_of(base.folder, WHOLE))[:2])
        raise SnapshotError(f"{base.key}: {files or 'its weights'}: {error}.") from error


def _refuse_own_output(reader: TensorReader, output: str, embedding: str) -> None:
    """Raise SnapshotError for an output layer of its own, although the config ties it."""
    own, tied = (reader.slice_of(name)[...] for name in (output, embedding))
    if own.dtype != tied.dtype or not own.equal(tied):
        raise SnapshotError(
            f"{output} differs from {embedding}, to which {CONFIG} ties it. Set "
            "tie_word_embeddings to false there"
        )


def open_base_of(
    adapters: Adapters, digest: str | None, where: Path, timeout: float, named: str | None = None
) -> Base:
    """The base of the adapters in the snapshot at `where`, whose weights have this digest.

    It is the repo at the commit that the snapshot names, or a folder: the snapshot's, or the one
    `named` by the user, or a snapshot in that. What exists on this disk is a folder. The weights of
    a repo may be left to fetch. Raises SnapshotError if the base is not there or another model is,
    StoreError if its store cannot be reached.
    """
    base, revision = adapters.base, adapters.revision
    place = base if revision is None else f"{PREFIX}{base}@{revision}"
    key = f"{where} holds adapters. Their base {place}"
    is_store = "://" in place and (named is None or _is_place(named, place))
    folders = Source(place, expanded(base if named is None else named)).folders()
    if is_store and revision is not None:  # a start needs no Hub if it is on this disk
        cached = huggingface_hub.try_to_load_from_cache(base, CONFIG, revision=revision)
        folders = [Path(cached).parent] if isinstance(cached, str) else []
    for folder in folders:
        with suppress(SnapshotError):  # half a download
            if (folder / CONFIG).is_file() and digest_of(folder) == digest:
                return Base(key, place, folder)
    # No address is opened that the user does not give: a snapshot may name any.
    if is_store and (revision is not None or named is not None):
        with naming(key):
            return base_of(key, find(place, timeout, any_model=True))
    fault = "is not there" if named is None else f"is not what is in {named}"
    raise SnapshotError(
        f"{key} {fault}. Name the folder that it is in now: a resume takes "
        "model.pretrained=<folder>; sample.py, evaluate.py and snapshot merge --base <folder>."
    )


def _is_place(named: str, place: str) -> bool:
    """Whether a user's name can mean a place in a store: no path, and no other commit or snapshot.

    A branch or a tag may lead to any commit.
    """
    if visible(expanded(named)).exists():
        return False
    (repo, _, at), (of_place, _, commit) = (
        name.removeprefix(PREFIX).partition("@") for name in (named, place)
    )
    return repo == of_place and (commit.startswith(at) or EXACT.fullmatch(at) is None)


def digest_of(folder: Path) -> str:
    """A hash of samples of a model's weights, which tells it from any other one in no time.

    It takes the names and sizes of the files, and parts from all over them: training changes nearly
    every number. Raises SnapshotError for files that cannot be read.
    """
    digest = hashlib.sha256()
    with readable(folder):
        for path in sorted(files_of(folder, WHOLE)):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with open(path, "rb") as opened:
                for i in range(SAMPLES):
                    opened.seek(max(0, size - SAMPLE_BYTES) * i // (SAMPLES - 1))
                    digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()
