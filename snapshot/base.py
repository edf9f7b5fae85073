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
from model.layout import Shape, Stored
from snapshot.disk.folder import expanded, names_in, readable, visible
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

COMMIT = re.compile(r"[0-9a-f]{40}")
EXACT = re.compile(rf"[0-9a-f]{{7,40}}|{SNAPSHOTS}/.+")
"""The part of a name that can mean only one commit or snapshot."""
SAMPLES, SAMPLE_BYTES = 64, 4096
"""Of each file with weights, in the digest of a base."""


@dataclass(frozen=True)
class Base:
    """A model whose configuration and tokenizer are on this disk."""

    key: str
    """The configuration key and value that name it, for messages."""
    folder: Path
    """Where config.json and the tokenizer lie, and the weights once they are there."""
    place: str = ""
    """The name by which another machine finds the same; empty for a folder."""
    download: Callable[[], object] = lambda: None
    """Downloads the weights and verifies them."""
    of_text: Mapping[str, Any] = field(default_factory=dict)
    """What is null in a config.json without a vocabulary: that, the context, the end of a text."""

    @property
    def published(self) -> tuple[str, str | None]:
        """How adapters name it: a repo and its commit, or a URL or a folder."""
        repo, _, commit = self.place.removeprefix(PREFIX).partition("@")
        if COMMIT.fullmatch(commit):
            return repo, commit
        return self.place or str(self.folder.absolute()), None

    @property
    def name(self) -> str:
        """The folder, or the store and its commit or snapshot."""
        name, commit = self.published
        return f"{name}@{commit[:12]}" if commit else self.place or str(self.folder)

    def on_text(self, vocabulary: int, context: int, end_of_text: int | None = None) -> Base:
        """The model for a text, whose sizes it has where its config.json leaves them open: null."""
        sizes = {"vocab_size": vocabulary, "max_position_embeddings": context}
        return replace(self, of_text={**sizes, "eos_token_id": end_of_text})

    def config(self, dropout: float, activation_checkpointing: bool) -> ModelConfig:
        """The sizes of the model. Raises SnapshotError if it cannot be built here."""
        content, _ = read_config(self.folder)
        if isinstance(content, dict) and content.get("vocab_size", ...) is None:
            if not self.of_text:
                raise SnapshotError(
                    f"{self.key}: its {CONFIG} leaves vocab_size to the text, so the model has no "
                    "size yet. Set it there, or train a model with model.architecture."
                )
            is_open = [key for key in self.of_text if content.get(key) is None]
            content = {**content, **{key: self.of_text[key] for key in is_open}}
        return model_config(content, f"{self.key}: its {CONFIG}", dropout, activation_checkpointing)

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
        source = Source(own) if own else find(value, timeout, any_model=True)
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
    if not source.is_run:  # there may be nothing to download
        _refuse_other_files(named, source.names(), with_weights)
    found = source.fetch_model(SMALL)
    if source.is_run:
        _refuse_other_files(named, names_in(found.path), with_weights=False)
    if (contents := found.contents) is None:
        return Base(named, found.path)
    work: Callable[[], object] = partial(source.fetch_model, INFERENCE)
    if source.is_run:  # that snapshot, whatever the run uploads meanwhile
        work = partial(with_retries, partial(fetch, contents, found.folder, None, INFERENCE))
    return Base(named, found.path, contents.pinned(found.folder).rstrip("@"), work)


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
            f"{named} has no weights as safetensors, and no others are read: they can execute "
            "code. Name a repo or a revision with model.safetensors (many have one at "
            "refs/pr/..., converted by the Hub), or save the model with transformers' "
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
                    _refuse_own_output(reader, name, embedding, shapes[name])
    except SnapshotError as error:
        files = ", ".join(sorted(path.name for path in files_of(base.folder, WHOLE))[:2])
        raise SnapshotError(f"{base.key}: {files or 'its weights'}: {error}.") from error


def _refuse_own_output(reader: TensorReader, output: str, embedding: str, shape: Shape) -> None:
    """Raise SnapshotError for an output layer of its own, although the config ties it."""
    everything = tuple(map(slice, shape))
    own, tied = (reader.read(Stored((name,)), shape, everything) for name in (output, embedding))
    if own.dtype != tied.dtype or not own.equal(tied):
        raise SnapshotError(
            f"{output} differs from {embedding}, to which {CONFIG} ties it. Set "
            "tie_word_embeddings to false there"
        )


def open_base_of(
    adapters: Adapters, digest: str | None, where: Path, timeout: float, named: str | None = None
) -> Base:
    """The base of the adapters in the snapshot at `where`, whose weights have this digest.

    It is the folder or the repo at the commit that the snapshot names, or a folder `named` by the
    user, or a snapshot in one of these. The weights of a repo may be left to fetch. Raises
    SnapshotError if the base is not there or another model is, StoreError if its store cannot be
    reached.
    """
    base, revision = adapters.base, adapters.revision
    folder = visible(expanded(base if named is None else named))
    is_repo = revision is not None and not (named is not None and folder.exists())
    if is_repo and named is not None and not _may_be(named, base, revision or ""):
        is_repo = False
    key = f"{where} holds adapters. Their base {base}{'' if revision is None else f'@{revision}'}"
    folders = Source(folder).folders()
    if is_repo:  # a start needs no Hub if it is on this disk
        cached = huggingface_hub.try_to_load_from_cache(base, CONFIG, revision=revision)
        folders = [Path(cached).parent] if isinstance(cached, str) else []
    for folder in folders:
        with suppress(SnapshotError):  # half a download
            if (folder / CONFIG).is_file() and digest_of(folder) == digest:
                return Base(key, folder)
    if is_repo:
        with naming(key):
            return base_of(key, find(f"{PREFIX}{base}@{revision}", timeout, any_model=True))
    fault = "is not there" if named is None else f"is not what is in {named}"
    raise SnapshotError(
        f"{key} {fault}. Name the folder that it is in now: a resume takes "
        "model.pretrained=<folder>; sample.py, evaluate.py and snapshot merge --base <folder>."
    )


def _may_be(named: str, repo: str, commit: str) -> bool:
    """Whether a user's name can mean this commit of a repo: a branch or a tag may be any."""
    named_repo, _, at = named.removeprefix(PREFIX).partition("@")
    return named_repo == repo and (commit.startswith(at) or not EXACT.fullmatch(at))


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
