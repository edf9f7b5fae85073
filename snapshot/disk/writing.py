"""Writes a snapshot: whole under its name, or absent."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from torch.optim import Optimizer

from model.family import LanguageModel
from model.sharded import reshard
from snapshot.config_values import value_of
from snapshot.disk.files import (
    MANIFEST,
    MANIFEST_FORMAT,
    InspectorFor,
    folder_name,
    names_in,
    no_inspector,
    sha256_of,
    temporary_name,
    write_json,
)
from snapshot.disk.numbers import NumberChecks
from snapshot.disk.peers import HASHED, WRITTEN, Markers, Ranks, shares
from snapshot.disk.pruning import make_way
from snapshot.disk.reference import ADAPTERS, CONFIG, BaseReference, stem_of
from snapshot.disk.shards import (
    Entry,
    Part,
    PendingParts,
    StagingBuffer,
    by_stem,
    gathered_parts,
    moment_entries,
    needs_gathering,
    own_parts,
    shapes_of,
    weight_entries,
    whole_parts,
)
from snapshot.disk.state import FORMAT_VERSION, STATE, RunState, versions
from snapshot.disk.tensor_files import Placement, TensorFiles, create_files, place_tensors
from snapshot.errors import SnapshotError


def begin_snapshot(
    root: Path,
    state: RunState,
    model: LanguageModel,
    optimizer: Optimizer,
    save_rest: Callable[[Path], None],
    *,
    writer: bool,
    piece_bytes: int,
    base: BaseReference | None = None,
    end_of_text: int | None = None,
    buffer: StagingBuffer | None = None,
    ranks: Ranks | None = None,
) -> PendingSnapshot:
    """Begin the snapshot after `state.step` in `root`; calling what it returns completes it.

    Every process must call this, with its unwrapped model, and complete it. The process with
    `writer` calls `save_rest(folder)` for additional files, and writes alone unless `ranks` has
    members, each of which writes its own shards; otherwise shards are gathered here. With `base`,
    only what is trained is written. transformers stops a model of our own at `end_of_text`. To
    complete it takes no collective, so it may run in a background thread during the next steps;
    until `release()` returns, neither weights nor optimizer may change.

    Both raise OSError if the disk rejects the files, and SnapshotError if numbers are out of bounds
    (see `snapshot.disk.numbers`) or if there was no update yet. Earlier snapshots then remain.
    """
    reshard(model)
    layout, stem = model.layout(), stem_of(base)
    optimizer_name = value_of(state.config, "optim.name")
    moments = moment_entries(layout, optimizer, optimizer_name)
    entries = [*weight_entries(layout, stem), *moments]
    placements = {}
    for name, of_stem in {"optimizer": [], **by_stem(entries)}.items():
        most = sys.maxsize if name == ADAPTERS else piece_bytes  # peft reads a single file
        placements[name] = place_tensors(shapes_of(of_stem), name, most)
    content = {"format_version": FORMAT_VERSION, **asdict(state)}

    def write_rest(folder: Path) -> None:
        save_rest(folder)
        _write_config(folder, base, model, end_of_text)
        write_json(folder / STATE, {**content, "versions": versions()})

    target, buffer = root / folder_name(state.step), buffer or StagingBuffer(0, int, False)
    pending = PendingSnapshot(target, entries, placements, write_rest, buffer, ranks)
    pending.begin(writer)
    return pending


def _write_config(
    folder: Path, base: BaseReference | None, model: LanguageModel, end_of_text: int | None
) -> None:
    if base is not None:
        base.write(folder)
        return
    write_json(folder / CONFIG, model.config.config_json(end_of_text))


class PendingSnapshot:
    """One snapshot, as one process sees it. Only `begin` contains collectives."""

    def __init__(
        self,
        target: Path,
        entries: Sequence[Entry],
        placements: Mapping[str, Placement],
        write_rest: Callable[[Path], None],
        buffer: StagingBuffer,
        ranks: Ranks | None,
    ) -> None:
        """`write_rest(folder)` writes the files without tensors, in the main process."""
        self._target, self._entries, self._placements = target, entries, placements
        self._write_rest, self._buffer = write_rest, buffer
        self._sharded = any(entry.is_sharded for entry in entries)
        self._ranks = ranks if self._sharded and ranks is not None and ranks.members else None
        self._parts = PendingParts([], buffer)
        self._inspect = NumberChecks().inspector_for
        self._digests: dict[str, str] = {}
        self._folder: Path | None = None  # where this process writes; None where it does not
        self._markers: Markers | None = None
        self._stack = ExitStack()

    def begin(self, writer: bool) -> None:
        """Create the files. Gather and write what cannot be written shard by shard.

        Every process must call this. The others hold what they write, or have no part in it. Raises
        OSError on the writer.
        """
        error = self._failure_of(self._create) if writer else None
        parts: list[Part] = []
        gathered: Iterator[Part] = iter(())
        if not self._sharded:
            parts = whole_parts(self._entries) if writer else []
        elif self._ranks is None:
            gathered = gathered_parts(self._entries)
        else:
            self._tell_folder(self._ranks)
            parts = own_parts(self._entries, writer)
            gathered = gathered_parts(filter(needs_gathering, self._entries))
        with ExitStack() as stack:
            files = stack.enter_context(self._files()) if writer else None
            for part in gathered:  # even if the disk is full: the others wait for every shard
                if files is not None and error is None:
                    error = self._failure_of(lambda part=part: part.write(files))  # type: ignore[misc]
        if error is not None:
            with self._reporting(), self._stack:
                raise error
        self._buffer.begin(sum(part.bytes for part in parts))
        self._parts = PendingParts(parts, self._buffer)

    def copy(self) -> None:
        """Copy what there is memory for, before it is written."""
        self._parts.copy()

    def release(self) -> None:
        """Return when weights and optimizer may change: what they hold is written, or copied."""
        self._parts.release()

    def __call__(self) -> Path:
        """Complete it, perhaps in a background thread. Raises OSError and SnapshotError."""
        with self._stack, self._reporting():
            if self._folder is not None:
                with self._files() as files:
                    self._parts.write(files)
                    if self._markers is not None:
                        files.flush()
                if self._markers is not None and self._ranks is not None:
                    self._share_hashing(self._folder, self._markers, self._ranks)
                if self._is_main:
                    self._write_rest(self._folder)
        return self._target

    @property
    def _is_main(self) -> bool:
        return self._ranks is None or self._ranks.rank == 0

    def _create(self) -> None:
        snapshot = atomic_snapshot(
            self._target.parent, self._target.name, self._inspect, self._digests
        )
        with ExitStack() as stack:
            folder = stack.enter_context(snapshot)
            create_files(folder, self._placements)
            if self._ranks is not None:
                self._markers = Markers(folder, self._ranks)
                self._markers.create(len(self._sizes()))
            self._stack = stack.pop_all()
        self._folder = folder

    def _tell_folder(self, ranks: Ranks) -> None:
        """Let the members know where the files are, if the main process could create them."""
        name = ranks.tell("" if self._folder is None else self._folder.name)
        if name and ranks.writes:
            self._folder = self._target.parent / name
            self._markers = Markers(self._folder, ranks)

    def _share_hashing(self, folder: Path, markers: Markers, ranks: Ranks) -> None:
        markers.reach(WRITTEN)
        markers.wait_for(WRITTEN)
        mine = shares(self._sizes(), ranks.members)[ranks.rank]
        found = {file: inspected_sha256(folder / file, self._inspect) for file in mine}
        markers.reach(HASHED, digests=found)
        if self._is_main:
            for content in markers.wait_for(HASHED):
                self._digests |= content["digests"]
            markers.remove()

    def _sizes(self) -> dict[str, int]:
        return {file: size for one in self._placements.values() for file, size in one.sizes.items()}

    def _files(self) -> TensorFiles:
        one_machine = self._ranks is None or self._ranks.one_machine
        return TensorFiles(self._folder or Path(), self._placements, one_machine)

    @staticmethod
    def _failure_of(work: Callable[[], None]) -> OSError | None:
        try:
            work()
        except OSError as error:
            return error
        return None

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Let the other members know of an error."""
        try:
            yield
        except BaseException as error:
            self._parts.abandon()
            if self._markers is not None:
                with suppress(Exception):
                    self._markers.fail(error)
            raise


@contextmanager
def atomic_snapshot(
    root: Path,
    name: str,
    inspector_for: InspectorFor = no_inspector,
    digests: Mapping[str, str] | None = None,
) -> Iterator[Path]:
    """A temporary folder that becomes `root/name` when the block ends, and is removed if it fails.

    The block fills the folder. At its end the manifest is added, everything is flushed to the disk,
    and one rename makes the snapshot visible. A kill at any moment leaves either a complete
    snapshot or nothing that looks like one. Raises SnapshotError if an inspector finds a fault.
    Files whose sha256 is in `digests` by then have been inspected already.
    """
    with atomic_folder(root, name, make_way) as building:
        yield building
        _write_manifest(building, inspector_for, digests or {})


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


def inspected_sha256(path: Path, inspector_for: InspectorFor) -> str:
    """The hash of a file. Raises SnapshotError if its inspector finds a fault, and OSError."""
    inspector = inspector_for(path)
    digest = sha256_of(path, inspector)
    if inspector is not None and inspector.fault is not None:
        raise SnapshotError(inspector.fault)
    return digest


def _write_manifest(folder: Path, inspector_for: InspectorFor, digests: Mapping[str, str]) -> None:
    files = []
    for name in sorted(names_in(folder)):
        path = folder / name
        digest = digests.get(name) or inspected_sha256(path, inspector_for)
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
