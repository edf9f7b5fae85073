"""Writes a snapshot: a whole one appears under its name, or none."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch.optim import Optimizer

from model.family import LanguageModel
from model.sharded import reshard
from snapshot.config_values import value_of
from snapshot.disk.files import (
    MANIFEST,
    MANIFEST_FORMAT,
    ReadFile,
    folder_name,
    names_in,
    read_plain,
    temporary_name,
    write_json,
)
from snapshot.disk.model import ADAPTERS, CONFIG, WHOLE, Adapters
from snapshot.disk.numbers import NumberChecks
from snapshot.disk.peers import HASHED, WRITTEN, Peers, Progress, files_by_rank
from snapshot.disk.pruning import make_way
from snapshot.disk.shards import (
    PendingShards,
    Shard,
    StagingBuffer,
    divide_shards,
    shapes_of,
    shards_of_moments,
    shards_of_weights,
)
from snapshot.disk.state import FORMAT_VERSION, STATE, RunState, versions
from snapshot.disk.tensor_files import TensorFile, TensorFiles, create_files, plan_files
from snapshot.errors import NumberFault


@dataclass(frozen=True)
class Destination:
    """Where the snapshots of a run are written, and by which processes."""

    root: Path
    """The folder of the snapshots."""
    piece_bytes: int
    """Bytes of the largest tensor file, unless one tensor is larger."""
    is_main: bool = True
    """Whether this is the main process."""
    peers: Peers | None = None
    """The processes that write their own shards. If there are none, the main process gathers."""
    buffer: StagingBuffer = field(default_factory=lambda: StagingBuffer(0, int, False))


def begin_snapshot(
    to: Destination,
    state: RunState,
    model: LanguageModel,
    optimizer: Optimizer,
    save_rest: Callable[[Path], None],
    adapters: Adapters | None = None,
    end_of_text: int | None = None,
) -> PendingSnapshot:
    """Begin the snapshot after `state.step`; `write` of what it returns completes it.

    Every process must call this, with its unwrapped model, and `write`. The main process calls
    `save_rest(folder)` for additional files. With `adapters`, they alone are written.
    transformers stops a model of our own at `end_of_text`. `write` calls no collective, so it can
    run in a background thread during the next steps. Neither weights nor optimizer may change
    before `shards.release()` of what it returns.

    Both raise OSError if the disk rejects the files, NumberFault if numbers are out of bounds (see
    `snapshot.disk.numbers`), SnapshotError if there was no update yet, and Unresumable where the
    optimizer keeps something else than a reader expects. Earlier snapshots then remain.
    """
    reshard(model)
    layout, prefix = model.layout(), WHOLE if adapters is None else ADAPTERS
    weights = shards_of_weights(layout, prefix)
    moments = shards_of_moments(layout, optimizer, value_of(state.config, "optim.name"))
    most = sys.maxsize if prefix == ADAPTERS else to.piece_bytes  # peft reads a single file
    files = {
        prefix: plan_files(shapes_of(weights), prefix, most),
        "optimizer": plan_files(shapes_of(moments), "optimizer", to.piece_bytes),
    }
    content = {"format_version": FORMAT_VERSION, **asdict(state)}

    def write_rest(folder: Path) -> None:
        save_rest(folder)
        if adapters is not None:
            adapters.write(folder)
        else:
            write_json(folder / CONFIG, model.config.config_json(end_of_text))
        write_json(folder / STATE, {**content, "versions": versions()})

    pending = PendingSnapshot(to, folder_name(state.step), files, write_rest)
    pending.begin([*weights, *moments])
    return pending


class PendingSnapshot:
    """One snapshot, as one process sees it. Only `begin` contains collectives."""

    def __init__(
        self,
        to: Destination,
        name: str,
        files: Mapping[str, Sequence[TensorFile]],
        write_rest: Callable[[Path], None],
    ) -> None:
        """`files` by the prefix of their names. `write_rest(folder)` writes those without tensors,
        in the main process.
        """
        self._to, self._name, self._files, self._write_rest = to, name, files, write_rest
        self.shards = PendingShards([], to.buffer)
        """What this process writes. The optimizer may change it once `release` has returned."""
        self._peers: Peers | None = None
        self._read = NumberChecks().read
        self._digests: dict[str, str] = {}
        self._folder: Path | None = None  # where this process writes; None if it does not
        self._progress: Progress | None = None
        self._stack = ExitStack()

    def begin(self, shards: Sequence[Shard]) -> None:
        """Create the files. Gather and write what the processes cannot write shard by shard.

        Every process must call this. Raises OSError on the main process.
        """
        is_main, peers = self._to.is_main, self._to.peers
        if any(shard.is_sharded for shard in shards) and peers is not None and peers.writing:
            self._peers = peers
        error: OSError | None = None
        try:
            if is_main:
                self._create()
        except OSError as failed:
            error = failed
        if self._peers is not None:
            name = self._peers.tell("" if self._folder is None else self._folder.name)
            if name and self._peers.writes:  # the main process could create the files
                self._folder = self._to.root / name
                self._progress = Progress(self._folder, self._peers)
        own, gathered = divide_shards(shards, is_main, self._peers is not None)
        with self._open_files() if is_main else nullcontext() as files:
            for shard in gathered:  # even if the disk is full: the others wait for every shard
                full = shard.gathered()
                try:
                    if files is not None and error is None:
                        full.write(files)
                except OSError as failed:
                    error = failed
        if error is not None:
            with self._reporting(), self._stack:
                raise error
        self._to.buffer.begin(sum(shard.bytes for shard in own))
        self.shards = PendingShards(own, self._to.buffer)

    def write(self) -> Path:
        """Complete it, perhaps in a background thread. Raises OSError and SnapshotError."""
        with self._stack, self._reporting():
            if self._folder is not None:
                with self._open_files() as files:
                    for shard in self.shards:
                        shard.write(files)
                    if self._progress is not None:
                        files.flush()
                if self._progress is not None and self._peers is not None:
                    self._hash_together(self._folder, self._progress, self._peers)
                if self._to.is_main:
                    self._write_rest(self._folder)
        return self._to.root / self._name

    def _create(self) -> None:
        snapshot = atomic_snapshot(self._to.root, self._name, self._read, self._digests)
        with ExitStack() as stack:
            folder = stack.enter_context(snapshot)
            for prefix, files in self._files.items():
                create_files(folder, prefix, files)
            if self._peers is not None:
                self._progress = Progress(folder, self._peers)
                self._progress.create(len(self._sizes()))
            self._stack = stack.pop_all()
        self._folder = folder

    def _hash_together(self, folder: Path, progress: Progress, peers: Peers) -> None:
        """Wait until all have written, and divide the hashing of the files among them."""
        progress.reach(WRITTEN)
        progress.wait_for(WRITTEN)
        mine = files_by_rank(self._sizes(), peers.writing)[peers.rank]
        found = {file: _sound_sha256(folder / file, self._read) for file in mine}
        progress.reach(HASHED, digests=found)
        if self._to.is_main:
            for content in progress.wait_for(HASHED):
                self._digests |= content["digests"]
            progress.remove()

    def _sizes(self) -> dict[str, int]:
        return {file.name: file.size for files in self._files.values() for file in files}

    def _open_files(self) -> TensorFiles:
        one_machine = self._peers is None or self._peers.one_machine
        planned = [file for files in self._files.values() for file in files]
        return TensorFiles(self._folder or Path(), planned, one_machine)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """On an error, tell the peers, and end an optimizer update's wait for the shards."""
        try:
            yield
        except BaseException as error:
            self.shards.abandon()
            if self._progress is not None:
                with suppress(Exception):
                    self._progress.fail(error)
            raise


@contextmanager
def atomic_snapshot(
    root: Path,
    name: str,
    read: ReadFile = read_plain,
    digests: Mapping[str, str] | None = None,
) -> Iterator[Path]:
    """A temporary folder that becomes `root/name` when the block ends, and is removed if it fails.

    The block fills the folder. At its end the manifest is added, everything is flushed to the disk,
    and one rename makes the snapshot visible. A kill at any moment leaves either a complete
    snapshot or nothing that looks like one. Raises SnapshotError if `read` finds a fault in a file.
    Files whose sha256 is in `digests` by then have been read already.
    """
    with atomic_folder(root, name, make_way) as building:
        yield building
        _write_manifest(building, read, digests or {})


@contextmanager
def atomic_folder(
    root: Path, name: str, displace: Callable[[Path], None] | None = None
) -> Iterator[Path]:
    """As `atomic_snapshot`, for a folder whose content includes the manifest, or needs none.

    `displace(root/name)` removes what is there just before the rename. Without it, a folder with
    files stays, and raises OSError.
    """
    root.mkdir(parents=True, exist_ok=True)
    building, final = root / temporary_name(name), root / name
    try:
        building.mkdir()
        yield building
        _flush(building)
        if displace is not None:
            displace(final)
        building.rename(final)
        _flush(root)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def _sound_sha256(path: Path, read: ReadFile) -> str:
    """The hash of a file. Raises NumberFault if `read` finds a fault in it, and OSError."""
    digest, fault = read(path)
    if fault is not None:
        raise NumberFault(fault)
    return digest


def _write_manifest(folder: Path, read: ReadFile, digests: Mapping[str, str]) -> None:
    files = []
    for name in sorted(names_in(folder)):
        path = folder / name
        digest = digests.get(name) or _sound_sha256(path, read)
        files.append({"path": name, "size": path.stat().st_size, "sha256": digest})
    write_json(folder / MANIFEST, {"format": MANIFEST_FORMAT, "files": files})


def _flush(folder: Path) -> None:
    """fsync a folder and its files: the rename must not reach the disk before the content."""
    for path in [*(path for path in folder.iterdir() if path.is_file()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
