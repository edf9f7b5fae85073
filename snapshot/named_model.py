"""The model that somebody names: in a repo of the Hub, a folder, or a snapshot of a run.

All of it is untrusted input. The small files, configuration and tokenizer, are read first; the
weights follow when nothing else is wrong. Snapshots of adapters name the base that they need.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import huggingface_hub  # imports the rest at its first use

from common.retries import with_retries
from data.subwords import tokenizer_of
from data.tokenizer import TOKENIZER_FILES, Tokenizer, lacks_file, refuse_larger_than
from data.tokenizer_files import GENERATION
from model.families import ARCHITECTURES, build_empty
from model.family import LanguageModel, ModelConfig
from model.lora import merge_adapters
from snapshot.disk.checking import check_weights
from snapshot.disk.folder import MANIFEST, expanded, names_in, visible, write_json
from snapshot.disk.load import digest_of, restore_weights
from snapshot.disk.model import (
    ADAPTER_CONFIG,
    ADAPTERS,
    CONFIG,
    WHOLE,
    Adapters,
    model_config,
    read_adapters,
    read_config,
)
from snapshot.disk.state import RunState, read_state
from snapshot.disk.tensor_files import create_files, plan_files
from snapshot.disk.tensors import parts_of_weights, shapes_of
from snapshot.errors import SnapshotError
from snapshot.source import TIMEOUT_SECONDS, WEIGHTS, Source, find, naming
from store.fetch import INFERENCE, SMALL, fetch
from store.latest import SNAPSHOTS
from store.store import PREFIX

BASE_HELP = "the folder or URL of the base, for a snapshot of adapters"
PIECE_BYTES = 2_000_000_000
"""Bytes of the largest file, as in a snapshot."""
COMMIT = re.compile(r"[0-9a-f]{40}")
EXACT = re.compile(rf"[0-9a-f]{{7,40}}|{SNAPSHOTS}/.+")
"""The part of a name that can mean only one commit or snapshot."""


@dataclass(frozen=True)
class NamedModel:
    """A model whose configuration and tokenizer are on this disk."""

    key: str
    """The key and the value that name it, for messages."""
    folder: Path
    """Where its small files lie, and the weights once they are there."""
    place: str = ""
    """The name by which another machine finds the same; empty for a folder."""
    download: Callable[[], object] = lambda: None
    """Downloads the weights and verifies them."""
    of_text: Mapping[str, Any] = field(default_factory=dict)
    """What is null in a config.json without a vocabulary: that, the context, the end of a text."""
    state: RunState | None = None
    """The state of the run that it is a snapshot of, if it is one; untrusted as all the rest."""
    adapters: Adapters | None = None
    """What that snapshot holds, if not the whole model."""
    base_name: str | None = None
    """Where their base is now, if they do not lead there."""

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

    @cached_property
    def sizes(self) -> ModelConfig:
        """Its sizes, with its adapters. Raises SnapshotError if it cannot be built here."""
        return replace(self.config(), lora=None if self.adapters is None else self.adapters.lora)

    def on_text(self, vocabulary: int, context: int, end_of_text: int | None = None) -> NamedModel:
        """The model for a text, whose sizes it has where its config.json leaves them open: null."""
        sizes = {"vocab_size": vocabulary, "max_position_embeddings": context}
        return replace(self, of_text={**sizes, "eos_token_id": end_of_text})

    def config(self, dropout: float = 0.0, activation_checkpointing: bool = False) -> ModelConfig:
        """The sizes of the model without adapters. Raises SnapshotError as `sizes` does."""
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

    def tokenizer(self) -> Tokenizer:
        """Its tokenizer. Raises DataError for one with more tokens than the model has."""
        tokenizer = tokenizer_of(self.folder)
        refuse_larger_than(self.sizes.vocab_size, tokenizer, str(self.folder))
        return tokenizer

    def fetch_weights(self, here: bool = True) -> Path:
        """Download the weights and verify their hashes; the folder with them.

        Without `here` another process of this machine has done it. Raises SnapshotError if they are
        not what they must be, StoreError for a failed download.
        """
        if here:
            with naming(self.key):
                self.download()
        return self.folder

    def load(self) -> LanguageModel:
        """The model with its weights, on the CPU. Raises SnapshotError and StoreError."""
        base = self
        if self.adapters is not None and self.state is not None:
            digest, where = self.state.base_digest, self.folder
            base = open_base_of(self.adapters, digest, where, TIMEOUT_SECONDS, self.base_name)
        weights = base.fetch_weights()
        check_weights(weights, base.key, replace(self.sizes, lora=None))  # before it is built
        model = build_empty(self.sizes)
        restore_weights(weights, model)
        if self.adapters is not None:
            restore_weights(self.folder, model, ADAPTERS)
        return model

    def write(self, folder: Path) -> None:
        """Write it as transformers loads it, in float32, with its tokenizer.

        Adapters are merged into it. Raises SnapshotError and DataError for what cannot be loaded,
        StoreError for a failed download, and OSError if the folder cannot be written.
        """
        self.tokenizer().save(folder)
        if (generation := self.folder / GENERATION).exists():
            shutil.copyfile(generation, folder / GENERATION)
        model = self.load()
        if self.adapters is not None:
            merge_adapters(model)
        parts = parts_of_weights(model.layout(), WHOLE)
        files = plan_files(shapes_of(parts), WHOLE, PIECE_BYTES)
        create_files(folder, WHOLE, files)
        file_of = {name: file for file in files for name in file.shapes}
        for part in parts:
            part.write(folder, file_of)
        write_json(folder / CONFIG, model.config.config_json())


def find_model(name: str, base: str | None = None) -> NamedModel:
    """The newest whole snapshot of a run or a store, a snapshot, or any other model, by its name.

    `base` is where the base of adapters is. Raises SnapshotError for what is none of these, and
    StoreError if a store cannot be reached.
    """
    key, source = f"model={name}", find(name, any_model=True)
    is_snapshot = source.contents is None and MANIFEST in source.names()
    if source.has_snapshots or is_snapshot:
        found = source.fetch(wanted=INFERENCE)
        adapters, state = read_adapters(found.path), read_state(found.path)
        place = "" if found.contents is None else found.contents.pinned(found.folder)
        named = NamedModel(key, found.path, place, state=state, adapters=adapters, base_name=base)
    else:
        named = base_of(key, source)
    if base is not None and named.adapters is None:
        raise SnapshotError(f"--base {base}: {named.name} holds its own weights. Leave it out.")
    return named


def open_base(key: str, value: str, timeout: float, with_weights: bool = True) -> NamedModel:
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
        contents = None if source.has_snapshots else source.contents
        if contents is not None and TOKENIZER_FILES[0] not in contents.files:
            raise SnapshotError(lacks_file(named, contents.store.name))
        return source.fetch_model(SMALL).path


def base_of(named: str, source: Source, with_weights: bool = True) -> NamedModel:
    """The model in a source, whose small files are downloaded; `named` begins each message.

    Raises SnapshotError for what is no model, StoreError for a failed download.
    """
    is_run = source.has_snapshots
    if not is_run:  # there may be nothing to download
        _refuse_other_files(named, source.names(), with_weights)
    found = source.fetch_model(SMALL)
    if is_run:
        _refuse_other_files(named, names_in(found.path), with_weights=False)
    if (contents := found.contents) is None:
        return NamedModel(named, found.path)
    work: Callable[[], object] = partial(source.fetch_model, INFERENCE)
    if is_run:  # that snapshot, whatever the run uploads meanwhile
        work = partial(with_retries, partial(fetch, contents, found.folder, None, INFERENCE))
    return NamedModel(named, found.path, contents.pinned(found.folder).rstrip("@"), work)


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


def open_base_of(
    adapters: Adapters, digest: str | None, where: Path, timeout: float, named: str | None = None
) -> NamedModel:
    """The base of the adapters in the snapshot at `where`, whose weights have this digest.

    It is the folder or the repo at the commit that the snapshot names, or a folder `named` by the
    user, or a snapshot in one of these. The weights of a repo may be left to fetch. Raises
    SnapshotError if the base is not there or another model is, StoreError if its store cannot be
    reached.
    """
    base, revision = adapters.base, adapters.revision
    folder = visible(expanded(base if named is None else named))
    is_repo = revision is not None
    if named is not None and is_repo:
        is_repo = not folder.exists() and _may_be(named, base, str(revision))
    key = f"{where} holds adapters. Their base {base}{'' if revision is None else f'@{revision}'}"
    folders = Source(folder).folders()
    if is_repo:  # a start needs no Hub if it is on this disk
        cached = huggingface_hub.try_to_load_from_cache(base, CONFIG, revision=revision)
        folders = [Path(cached).parent] if isinstance(cached, str) else []
    for folder in folders:
        with suppress(SnapshotError):  # half a download
            if (folder / CONFIG).is_file() and digest_of(folder) == digest:
                return NamedModel(key, folder)
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
