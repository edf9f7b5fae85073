"""The model that a run begins from: a repo of the Hub, a folder, or another run's snapshot.

All of it is untrusted input. The small files, configuration and tokenizer, are read first; the
weights follow when nothing else is wrong. Snapshots of adapters name the base that they need.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub  # imports the rest at its first use

from data.tokenizer import TOKENIZER_FILES, lacks_file
from data.tokenizer_files import CHAT_TEMPLATE, GENERATION, MORE_TEMPLATES
from model.families import ARCHITECTURES
from model.family import ModelConfig
from snapshot.disk.files import (
    expanded,
    readable,
    sha256_of,
    snapshot_folders,
    snapshots_in,
    visible,
)
from snapshot.disk.model import (
    ADAPTER_CONFIG,
    CONFIG,
    WHOLE,
    Adapters,
    layout_for,
    model_config,
    read_config,
)
from snapshot.disk.reading import TIE, TensorReader, files_of, has_own_output
from snapshot.errors import SnapshotError
from snapshot.source import newest_snapshot
from store.errors import StoreError, StoreUnreachable
from store.hub import Hub
from store.kinds import named_repo
from store.store import BRANCH, PREFIX, RemoteFile, with_retries

LARGEST_SMALL_BYTES = 64 << 20
"""Of a file that is read before the weights; the largest tokenizers have 40 MB."""
SMALL_FILES = (CONFIG, *TOKENIZER_FILES, CHAT_TEMPLATE, GENERATION)
TEMPLATE_FILE = re.compile(rf"{MORE_TEMPLATES}/[^/]+\.jinja")
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Files of a whole model that hold weights."""
OLD_WEIGHTS = re.compile(r"pytorch_model.*\.bin|.*\.(bin|pt|pth|ckpt|h5|msgpack|gguf)")
GGUF = ".gguf"
WITHOUT_OWNER = re.compile(rf"(?:{PREFIX})?([A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
"""The name of a repo from before the Hub's repos had owners, such as gpt2."""
SAMPLES, SAMPLE_BYTES = 64, 4096
"""Of each file with weights, in the digest of a base."""


@dataclass(frozen=True)
class Base:
    """A model whose configuration and tokenizer are on this disk."""

    key: str
    """The configuration key and value that name it, for messages."""
    name: str
    """The folder, or the repo with its commit."""
    folder: Path
    """Where config.json and the tokenizer lie, and the weights once they are there."""
    repo: Hub | None = None
    commit: str = ""
    weights: tuple[tuple[str, RemoteFile], ...] = ()
    """The files of a repo that hold the weights."""
    of_text: Mapping[str, Any] = field(default_factory=dict)
    """What is null in a config.json without a vocabulary: that, the context, the end of a text."""

    def on_text(self, vocabulary: int, context: int, end_of_text: int | None = None) -> Base:
        """The model for a text, whose sizes it has where its config.json leaves them open: null."""
        sizes = {"vocab_size": vocabulary, "max_position_embeddings": context}
        return replace(self, of_text={**sizes, "eos_token_id": end_of_text})

    def config(
        self, dropout: float, activation_checkpointing: bool | str, untied: bool = False
    ) -> ModelConfig:
        """The sizes of the model. Raises SnapshotError if it cannot be built here.

        An `untied` model has an output layer of its own, whatever its config says.
        """
        content, _ = read_config(self.folder)
        if isinstance(content, dict) and content.get("vocab_size", ...) is None:
            if not self.of_text:
                raise SnapshotError(
                    f"{self.key}: its {CONFIG} leaves vocab_size to the text, so the model has no "
                    "size yet. Set it there, or train a new model with an optim.learning_rate."
                )
            is_open = [key for key in self.of_text if content.get(key) is None]
            content = {**content, **{key: self.of_text[key] for key in is_open}}
        if untied:
            content = {**content, TIE: False}
        return model_config(content, f"{self.key}: its {CONFIG}", dropout, activation_checkpointing)

    def parameters(self) -> int:
        """Numbers in its parameters, without an untied output layer. Raises SnapshotError."""
        sizes = self.config(dropout=0.0, activation_checkpointing=False)
        return layout_for(sizes).size_without_output()

    def fetch_weights(self, here: bool = True) -> Path:
        """Download the weights to the Hub client's cache and verify their hashes; their folder.

        Without `here` another process of this machine has done it. Raises SnapshotError if they are
        not what they must be, StoreError for a failed download.
        """
        if not here or self.repo is None:
            return self.folder
        files = dict(self.weights)
        for again in (False, True):
            get = partial(self.repo.download_all, self.commit, files, None, again)
            with_retries(get)
            wrong = [name for name, file in files.items() if not self._is_listed(name, file)]
            if not wrong:
                return self.folder
        raise SnapshotError(f"{self.key}: {wrong[0]} is not what the repo lists, even on a retry.")

    def _is_listed(self, name: str, file: RemoteFile) -> bool:
        path = self.folder / name
        with readable(path):
            return path.stat().st_size == file.size and file.sha256 in (None, sha256_of(path))


def open_base(key: str, value: str, timeout: float, with_weights: bool = True) -> Base:
    """Find the model that `key=value` names, and download its small files if it is a repo.

    The architecture of a preset is this project's, whatever there is of that name elsewhere.
    Raises SnapshotError for what is no such model, StoreError if the Hub cannot be reached.
    """
    named = f"{key}={value}"
    own = ARCHITECTURES.get(value) if key == "model.architecture" else None
    path = own or visible(expanded(value))
    if path.exists():
        return _local(named, path, with_weights)
    hub, revision = _repo_of(named, value, timeout)
    with naming(named):
        return with_retries(lambda: _remote(named, hub, revision, with_weights))


def open_tokenizer(value: str, timeout: float) -> Path:
    """Download the tokenizer of the repo that `data.tokenizer` names; its folder.

    Raises SnapshotError if there is none, StoreError if the Hub cannot be reached.
    """
    named = f"data.tokenizer={value}"
    hub, revision = _repo_of(named, value, timeout)

    def fetch() -> Path:
        commit, _ = hub.head(revision)
        return _fetch_small(named, hub, commit, hub.files(commit), TOKENIZER_FILES[0])

    with naming(named):
        return with_retries(fetch)


def _repo_of(named: str, value: str, timeout: float) -> tuple[Hub, str]:
    """The repo and the revision of a name that is no path. Raises SnapshotError."""
    try:
        found = named_repo(value)
    except SnapshotError as error:
        raise SnapshotError(f"{named}: {error}") from error
    if found is None and (match := WITHOUT_OWNER.fullmatch(value)) is not None:
        found = match[1], match[2] or BRANCH
    if found is None:
        raise SnapshotError(
            f"{named} is neither a folder that exists nor the name of a repo on the Hub "
            "(owner/name or owner/name@revision)."
        )
    return Hub(found[0], timeout), found[1]


@contextmanager
def naming(named: str) -> Iterator[None]:
    """Name the key and the value in errors of the Hub; those that last are user errors."""
    try:
        yield
    except StoreUnreachable as error:
        raise StoreUnreachable(f"{named}: {error}") from error
    except StoreError as error:
        raise SnapshotError(f"{named}: {str(error).rstrip('.')}.") from error


def _local(named: str, path: Path, with_weights: bool) -> Base:
    if snapshot_folders(snapshots_in(path)) or snapshot_folders(path):
        path = newest_snapshot(path)
    _refuse_part(named, [file.name for file in path.iterdir()] if path.is_dir() else [])
    if not (path / CONFIG).is_file():
        what = "it is neither a model nor a run with snapshots"
        raise SnapshotError(f"{named} has no {CONFIG}: {what}. Check the path.")
    if with_weights:
        _refuse_without_safetensors(named, [file.name for file in path.iterdir()])
    return Base(named, str(path), path)


def _remote(named: str, hub: Hub, revision: str, with_weights: bool) -> Base:
    commit, _ = hub.head(revision)
    files = hub.files(commit)
    _refuse_part(named, files)
    if with_weights and CONFIG in files:
        _refuse_without_safetensors(named, list(files))
    folder = _fetch_small(named, hub, commit, files, CONFIG)
    weights = {name: file for name, file in files.items() if WEIGHTS.fullmatch(name)}
    name = f"{hub.repo_id}@{commit[:12]}"
    return Base(named, name, folder, hub, commit, tuple(weights.items()) if with_weights else ())


def _fetch_small(
    named: str, hub: Hub, commit: str, files: Mapping[str, RemoteFile], needed: str
) -> Path:
    """Download configuration and tokenizer, as far as there are any; their folder."""
    if needed not in files:
        if needed == TOKENIZER_FILES[0]:
            raise SnapshotError(lacks_file(named, hub.repo_id, files))
        raise SnapshotError(f"{named} has no {needed}.")
    templates = sorted(filter(TEMPLATE_FILE.fullmatch, files))
    names = [*(name for name in SMALL_FILES if name in files), *templates]
    for name in names:
        if files[name].size > LARGEST_SMALL_BYTES:
            size = f"{files[name].size:,} bytes, over the limit of {LARGEST_SMALL_BYTES:,}"
            raise SnapshotError(f"{named}: {name} has {size}.")
    paths = [hub.download(commit, name, None) for name in names]
    return paths[0].parent


def _refuse_part(named: str, names: Collection[str]) -> None:
    if CONFIG in names:
        return
    if ADAPTER_CONFIG in names:
        raise SnapshotError(
            f"{named} holds adapters and not their base. Merge the two, with `python -m snapshot "
            "merge <name> <folder>` for a run of this project, and with peft's merge_and_unload "
            "for another, and name the result."
        )
    if packed := sorted(name for name in names if name.endswith(GGUF)):
        value = named.partition("=")[2] or named
        file = f"from_pretrained({value!r}, gguf_file={packed[0]!r}).save_pretrained('unpacked')"
        raise SnapshotError(
            f"{named} has its weights as {packed[0]} and no {CONFIG}. Convert them with "
            f"transformers and gguf: AutoModelForCausalLM.{file}, and AutoTokenizer.{file}. Then "
            "name the folder unpacked."
        )


def _refuse_without_safetensors(named: str, names: list[str]) -> None:
    if any(WEIGHTS.fullmatch(name) for name in names):
        return
    others = sorted(name for name in names if OLD_WEIGHTS.fullmatch(name))
    if others:
        raise SnapshotError(
            f"{named} has its weights as {others[0]} and not as safetensors; such files can "
            "execute code, or are quantized, and are not read. Name a repo or a revision with "
            "safetensors (many repos have one at refs/pr/..., converted by the Hub)."
        )
    raise SnapshotError(f"{named} has no weights (model.safetensors).")


def check_weights(base: Base, config: ModelConfig) -> bool:
    """Compare names and shapes in the headers of the weights with the model's.

    Returns whether they have an output layer of their own, although the config ties it to the
    embedding. Raises SnapshotError, with the name, for a tensor that is missing, surplus or of
    another shape.
    """
    try:
        layout = layout_for(config)
        with TensorReader(base.folder, "model") as reader:
            shapes, found = reader.shapes(), reader.find(layout)
        for name, parameter in layout.parameters().items():
            if name not in found:
                raise SnapshotError(f"it lacks {name}")
            if (there := found[name].shape_of(shapes)) != tuple(parameter.shape):
                needed = list(parameter.shape)
                raise SnapshotError(f"{name} has the shape {list(there)}, its config says {needed}")
        return has_own_output(base.folder, layout)
    except SnapshotError as error:
        files = ", ".join(path.name for path in files_of(base.folder, "model")[:2])
        raise SnapshotError(f"{base.key}: {files or 'its weights'}: {error}.") from error


def open_base_of(
    adapters: Adapters, digest: str | None, where: Path, timeout: float, instead: str | None = None
) -> Base:
    """The base of the adapters in the snapshot at `where`, whose weights have this digest.

    `instead` is a folder that may hold it, too. The weights of a repo may be left to fetch. Raises
    SnapshotError if it is not there or another model is, StoreError if the Hub cannot be reached.
    """
    revision = adapters.revision
    label = adapters.base if revision is None else f"{adapters.base}@{revision[:12]}"
    key = f"{where} holds adapters. Their base {label}"
    other = None
    for folder in _folders_that_may_hold(adapters, instead):
        if (folder / CONFIG).is_file():
            other = folder
            with suppress(SnapshotError):  # half a download
                if digest_of(folder) == digest:
                    return Base(key, label, folder)
    if revision is not None:
        with naming(key):
            hub = Hub(adapters.base, timeout)
            return with_retries(lambda: _remote(key, hub, revision, True))
    fault = "is not there" if other is None else f"is not what is in {other}"
    raise SnapshotError(
        f"{key} {fault}. Name the folder that it is in now: a resume takes "
        "model.pretrained=<folder>; sample.py, evaluate.py and snapshot merge --base <folder>."
    )


def _folders_that_may_hold(adapters: Adapters, instead: str | None) -> Iterator[Path]:
    if instead is not None:
        given = expanded(instead)
        yield from (given, *snapshot_folders(snapshots_in(given)), *snapshot_folders(given))
    if adapters.revision is None:
        yield Path(adapters.base)
        return
    cached = huggingface_hub.try_to_load_from_cache(
        adapters.base, CONFIG, revision=adapters.revision
    )
    if isinstance(cached, str):
        yield Path(cached).parent


def digest_of(folder: Path) -> str:
    """A hash of samples of a model's weights, which tells it from any other one in no time.

    It takes the names and sizes of the files, and parts from all over them: training changes nearly
    every number. Raises SnapshotError for files that cannot be read.
    """
    digest = hashlib.sha256()
    with readable(folder):
        for path in files_of(folder, WHOLE):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with open(path, "rb") as opened:
                for i in range(SAMPLES):
                    opened.seek(max(0, size - SAMPLE_BYTES) * i // (SAMPLES - 1))
                    digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()
