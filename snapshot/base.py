"""The model that a run begins from: a repo of the Hub, a folder, or another run's snapshot.

All of it is untrusted input. The small files, configuration and tokenizer, are read first; the
weights follow when nothing else is wrong. Snapshots that hold only what is trained refer to their
base: it is kept at the start of the run, and verified when it is read again.
"""

from __future__ import annotations

import filecmp
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from data.public_names import public_name
from data.tokenizer import TOKENIZER_FILES, lacks_file
from data.tokenizer_files import CHAT_TEMPLATE, GENERATION, MORE_TEMPLATES
from model.family import ModelConfig
from model.lora import Lora
from snapshot.disk.files import (
    SNAPSHOT_NAME,
    TEMPORARY_PREFIX,
    readable,
    sha256_of,
    snapshot_folders,
    snapshots_in,
    visible,
)
from snapshot.disk.model import (
    ADAPTER_CONFIG,
    BASE,
    CONFIG,
    WEIGHTS,
    BaseReference,
    layout_for,
    model_config,
    read_config,
)
from snapshot.disk.reading import TIE, TensorReader, files_of, has_own_output
from snapshot.errors import SnapshotError
from snapshot.start import newest_snapshot
from store.errors import HubError, HubUnreachable
from store.kinds import named_repo
from store.repo import Hub
from store.store import BRANCH, PREFIX, RemoteFile, with_retries

LARGEST_SMALL_BYTES = 64 << 20
"""Of a file that is read before the weights; the largest tokenizers have 40 MB."""
SMALL_FILES = (
    CONFIG,
    BASE,
    ADAPTER_CONFIG,
    *TOKENIZER_FILES,
    CHAT_TEMPLATE,
    GENERATION,
)
TEMPLATE_FILE = re.compile(rf"{MORE_TEMPLATES}/[^/]+\.jinja")
OLD_WEIGHTS = re.compile(r"pytorch_model.*\.bin|.*\.(bin|pt|pth|ckpt|h5|msgpack|gguf)")
GGUF = ".gguf"
WITHOUT_OWNER = re.compile(rf"(?:{PREFIX})?([A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
"""The name of a repo from before the Hub's repos had owners, such as gpt2."""
OWN_BASE = "base"
"""In a run's directory: the base of its snapshots."""
ELSEWHERE = (
    "A run keeps its base there and changes nothing that it finds: move it away, or give the run "
    "another run.name."
)


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
    """Files that hold the weights, if it is known what they must be: always for a repo."""

    def config(
        self, dropout: float, activation_checkpointing: bool | str, untied: bool = False
    ) -> ModelConfig:
        """The sizes of the model. Raises SnapshotError if it cannot be built here.

        An `untied` model has an output layer of its own, whatever its config says.
        """
        content, _ = read_config(self.folder)
        if untied:
            content = {**content, TIE: False}
        return model_config(content, f"{self.key}: its {CONFIG}", dropout, activation_checkpointing)

    def fetch_weights(self, here: bool = True) -> Path:
        """Download the weights to the Hub client's cache and verify their hashes; their folder.

        Without `here` another process of this machine has done it. Raises SnapshotError if they are
        not what they must be, HubError for a failed download.
        """
        if not here:
            return self.folder
        files = dict(self.weights)
        for again in (False, True) if self.repo is not None else (False,):
            if self.repo is not None:
                get = partial(self.repo.download_all, self.commit, files, None, again)
                with_retries(get)
            wrong = [name for name, file in files.items() if not self._is_listed(name, file)]
            if not wrong:
                return self.folder
        listed = "what the repo lists, even on a retry" if self.repo else "what it was"
        raise SnapshotError(f"{self.key}: {wrong[0]} is not {listed}.")

    def _is_listed(self, name: str, file: RemoteFile) -> bool:
        path = self.folder / name
        with readable(path):
            return path.stat().st_size == file.size and file.sha256 in (None, sha256_of(path))

    def reference(
        self, config: dict[str, Any], lora: Lora | None, is_uploaded: bool
    ) -> BaseReference:
        """What a snapshot says of this base, whose weights are there: their hashes, too.

        `config` is the content of its config.json. What `is_uploaded` does not say where a folder
        lies. Raises SnapshotError for unreadable files.
        """
        with readable(self.folder):
            names = [one.name for one in self.folder.iterdir() if WEIGHTS.fullmatch(one.name)]
            paths = [self.folder / name for name in sorted(names)]
            files = {path.name: (path.stat().st_size, sha256_of(path)) for path in paths}
        if self.repo is None:
            name = public_name(self.name) if is_uploaded else str(self.folder.absolute())
            return BaseReference(name, None, files, config, lora)
        return BaseReference(self.repo.repo_id, self.commit, files, config, lora)


def open_base(key: str, value: str, timeout: float, with_weights: bool = True) -> Base:
    """Find the model that `key=value` names, and download its small files if it is a repo.

    Raises SnapshotError for what is no such model, HubError if the Hub cannot be reached.
    """
    named = f"{key}={value}"
    path = visible(Path(value).expanduser())
    if path.exists():
        return _local(named, path, with_weights)
    hub, revision = _repo_of(named, value, timeout)
    with naming(named):
        return with_retries(lambda: _remote(named, hub, revision, with_weights))


def open_tokenizer(value: str, timeout: float) -> Path:
    """Download the tokenizer of the repo that `data.tokenizer` names; its folder.

    Raises SnapshotError if there is none, HubError if the Hub cannot be reached.
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
    except HubUnreachable as error:
        raise HubUnreachable(f"{named}: {error}") from error
    except HubError as error:
        raise SnapshotError(f"{named}: {str(error).rstrip('.')}.") from error


def _local(named: str, path: Path, with_weights: bool) -> Base:
    if snapshot_folders(snapshots_in(path)) or snapshot_folders(path):
        path = newest_snapshot(path)
    if with_weights:
        _refuse_part(named, [file.name for file in path.iterdir()] if path.is_dir() else [])
    if not (path / CONFIG).is_file() and not (path / BASE).is_file():
        what = "it is neither a model nor a run with snapshots"
        raise SnapshotError(f"{named} has no {CONFIG}: {what}. Check the path.")
    if with_weights:
        _refuse_without_safetensors(named, [file.name for file in path.iterdir()])
    return Base(named, str(path), path)


def _remote(named: str, hub: Hub, revision: str, with_weights: bool) -> Base:
    commit, _ = hub.head(revision)
    files = hub.files(commit)
    if with_weights:
        _refuse_part(named, files)
        if CONFIG in files:
            _refuse_without_safetensors(named, list(files))
    folder = _fetch_small(named, hub, commit, files, BASE if BASE in files else CONFIG)
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
    if BASE in names:
        raise SnapshotError(
            f"{named} holds only the trained weights, and not their base. Write a whole model "
            "with `python -m snapshot merge <name> <folder>`, and name that folder."
        )
    if ADAPTER_CONFIG in names:
        raise SnapshotError(
            f"{named} is an adapter and not a model. Merge it into its base with peft's "
            "merge_and_unload, and name the result."
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


def open_reference(
    base: BaseReference, where: Path, timeout: float, instead: str | None = None
) -> Base:
    """The base of the snapshot at `where`, verified. `instead` is a folder that may hold it, too.

    Raises SnapshotError if it is not there or has changed, HubError if it cannot be downloaded.
    """
    weights = {name: RemoteFile(*entry) for name, entry in base.files.items()}
    label = base.name if base.commit is None else f"{base.name}@{base.commit[:12]}"
    key = f"{where} holds only the trained weights. Its base {label}"
    if base.commit is not None:
        hub = Hub(base.name, timeout)
        commit, first = base.commit, next(iter(weights))
        with naming(key):
            folder = with_retries(lambda: hub.download(commit, first, None)).parent
        return Base(key, label, folder, hub, commit, tuple(weights.items()))
    changed = None
    for folder in _folders_that_may_hold(base, where, instead):
        with readable(folder):
            if not all((folder / name).is_file() for name in weights):
                continue
        found = Base(key, label, folder, weights=tuple(weights.items()))
        try:
            found.fetch_weights()
            return replace(found, weights=())
        except SnapshotError as error:
            changed = error
    raise changed or SnapshotError(
        f"{key} is missing. Name the folder that it is in now: a resume takes "
        "model.pretrained=<folder>; sample.py, evaluate.py and snapshot merge --base <folder>."
    )


def _folders_that_may_hold(base: BaseReference, where: Path, instead: str | None) -> Iterator[Path]:
    if instead is not None:
        other = Path(instead).expanduser()
        yield from (other, *snapshot_folders(snapshots_in(other)), *snapshot_folders(other))
    yield where.parent.parent / OWN_BASE  # the run's directory may have been moved
    yield Path(base.name)


def keep_base(base: Base, run_dir: Path) -> Base:
    """Keep the files of a local base in the run's directory, as links that take no space.

    The folder may be a snapshot that its run removes. On another file system a snapshot is copied,
    and any other folder stays where it is. What lies in the run's directory already stays as it is.
    Raises SnapshotError if that is another model, and OSError.
    """
    own = run_dir.absolute() / OWN_BASE
    if base.repo is not None or (own.exists() and own.samefile(base.folder)):
        return base
    if own.is_symlink():  # the folder behind it is somebody else's
        raise SnapshotError(f"{own} is a link, and {base.name} would be kept there. {ELSEWHERE}")
    found = [*base.folder.iterdir(), *base.folder.glob(f"{MORE_TEMPLATES}/*")]
    names = [path.relative_to(base.folder).as_posix() for path in found]
    missing = [
        name for name in filter(_is_of_model, names) if not _is_kept(base.folder / name, own / name)
    ]
    is_new = not own.exists()
    own.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    for name in missing:
        path, kept = base.folder / name, own / name
        kept.parent.mkdir(exist_ok=True)
        try:
            os.link(path.resolve(), kept)
        except OSError:
            if SNAPSHOT_NAME.fullmatch(base.folder.name) is None:
                for one in made:
                    one.unlink()
                if is_new:
                    shutil.rmtree(own)
                return base
            copy = own / f"{TEMPORARY_PREFIX}{path.name}"  # a kill must not leave half a model
            copy.unlink(missing_ok=True)
            shutil.copyfile(path, copy)
            copy.rename(kept)
        made.append(kept)
    return replace(base, folder=own)


def _is_of_model(name: str) -> bool:
    return name in SMALL_FILES or any(one.fullmatch(name) for one in (WEIGHTS, TEMPLATE_FILE))


def _is_kept(path: Path, kept: Path) -> bool:
    """Whether a file is kept already. Raises SnapshotError if there is another one of its name."""
    if not os.path.lexists(kept):
        return False
    if kept.is_file() and (kept.samefile(path) or filecmp.cmp(kept, path, shallow=False)):
        return True
    raise SnapshotError(f"{kept} is not the file of {path.parent}. {ELSEWHERE}")
