"""Writes a snapshot: a whole one appears under its name, or none."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Event

from torch.optim import Optimizer

from model.family import LanguageModel
from model.sharded import reshard
from snapshot.config_values import value_of
from snapshot.disk.folder import atomic_snapshot, folder_name, sha256_of, write_json
from snapshot.disk.model import ADAPTERS, CONFIG, WHOLE, Adapters
from snapshot.disk.state import FORMAT_VERSION, STATE, RunState, versions
from snapshot.disk.tensor_files import TensorFile, TensorFiles, create_files, plan_files
from snapshot.disk.tensors import (
    Entry,
    Part,
    divide,
    entries_of_moments,
    entries_of_weights,
    shapes_of,
)
from snapshot.disk.writers import Writers
from snapshot.errors import NumberFault


def begin_snapshot(
    root: Path,
    state: RunState,
    model: LanguageModel,
    optimizer: Optimizer,
    save_rest: Callable[[Path], None],
    *,
    adapters: Adapters | None = None,
    end_of_text: int | None = None,
    piece_bytes: int = sys.maxsize,
    writers: Writers | None = None,
) -> Snapshot:
    """Begin the snapshot after `state.step` in `root`; `write` of what it returns completes it.

    Every process must call this, with its unwrapped model, and `write`. The main process calls
    `save_rest(folder)` for additional files. With `adapters`, they alone are written. transformers
    stops a model of our own at `end_of_text`. A tensor file has at most `piece_bytes`, unless one
    tensor is larger. `write` calls no collective of training, so it can run in a background thread
    during the next steps. Weights and optimizer may change once `release` has returned.

    Raises SnapshotError if there was no update yet, and Unresumable where the optimizer keeps
    something else than a reader expects.
    """
    reshard(model)
    layout, prefix = model.layout(), WHOLE if adapters is None else ADAPTERS
    weights = entries_of_weights(layout, prefix)
    moments = entries_of_moments(layout, optimizer, value_of(state.config, "optim.name"))
    most = sys.maxsize if prefix == ADAPTERS else piece_bytes  # peft reads a single file
    files = {
        prefix: plan_files(shapes_of(weights), prefix, most),
        "optimizer": plan_files(shapes_of(moments), "optimizer", piece_bytes),
    }
    content = {"format_version": FORMAT_VERSION, **asdict(state)}

    def write_rest(folder: Path) -> None:
        save_rest(folder)
        if adapters is not None:
            adapters.write(folder)
        else:
            write_json(folder / CONFIG, model.config.config_json(end_of_text))
        write_json(folder / STATE, {**content, "versions": versions()})

    snapshot = Snapshot(root / folder_name(state.step), files, write_rest, writers or Writers())
    snapshot.begin([*weights, *moments])
    return snapshot


class Snapshot:
    """One snapshot while it is written, as one process sees it."""

    def __init__(
        self,
        place: Path,
        files: Mapping[str, Sequence[TensorFile]],
        write_rest: Callable[[Path], None],
        writers: Writers,
    ) -> None:
        """`place` is the folder that appears when it is whole.

        `files` by the prefix of their names. `write_rest(folder)` writes those without tensors, in
        the main process.
        """
        self._place, self._files, self._write_rest = place, files, write_rest
        self._writers = writers
        self._parts: deque[Part] = deque()
        """What this process has yet to write."""
        self._digests: dict[str, str] = {}
        self._folder: Path | None = None  # where this process writes; None if it does not
        self._fault: OSError | NumberFault | None = None
        self._stack = ExitStack()
        self._update_is_next, self._released = Event(), Event()

    def begin(self, entries: Iterable[Entry]) -> None:
        """Create the files. Gather and write what the processes cannot write part by part.

        Every process must call this. `write` raises what the disk refuses here.
        """
        is_main = self._writers.is_main
        parts, to_gather = divide(entries, is_main, self._writers.group is not None)
        self._parts.extend(sorted(parts, key=lambda part: part.bytes))  # short waits for an update
        if is_main:
            self._try(self._create)
        with self._open_files() as files:
            for entry in to_gather:  # even if the disk is full: the others wait for each
                part = entry.gathered()
                if is_main and self._fault is None:
                    self._try(partial(part.write, files))

    def write(self, room: Callable[[], int] | None = None, copy_first: bool = False) -> Path:
        """Complete it, perhaps in a thread; its folder. Raises OSError and SnapshotError.

        `room()`: bytes that copies may take. Whatever an update would change is first copied if
        there is room for all that is left; otherwise the update waits until it is written. With
        `copy_first` everything is copied before anything is written.
        """
        if copy_first:
            self._update_is_next.set()
        try:
            with self._stack:
                name = self._writers.on_all(self._name_of_folder)[0]
                if self._folder is None and self._writers.group is not None:
                    self._folder = self._place.with_name(name)
                self._writers.on_all(lambda: self._write_parts(room))
                if self._writers.group is not None:
                    for digests in self._writers.on_all(self._hash):
                        self._digests |= digests
                if self._writers.is_main:
                    assert self._folder is not None
                    self._write_rest(self._folder)
        finally:
            self._parts.clear()
            self._released.set()
        return self._place

    def release(self) -> None:
        """Return when an update may change the tensors: each is written, or copied.

        `write` must be running in another thread.
        """
        self._update_is_next.set()
        self._released.wait()

    def _create(self) -> None:
        building = atomic_snapshot(self._place.parent, self._place.name, self._digests)
        with ExitStack() as stack:
            folder = stack.enter_context(building)
            for prefix, files in self._files.items():
                create_files(folder, prefix, files)
            self._stack = stack.pop_all()
        self._folder = folder

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, NumberFault) as fault:
            self._fault = fault

    def _name_of_folder(self) -> str:
        if self._fault is not None:
            raise self._fault
        return "" if self._folder is None else self._folder.name

    def _write_parts(self, room: Callable[[], int] | None) -> None:
        with self._open_files() as files:
            while self._parts:
                if self._update_is_next.is_set() and not self._released.is_set():
                    self._copy_parts(room)
                self._parts.popleft().write(files)  # a copy is freed at once
            self._released.set()
            if self._writers.group is not None:
                files.flush()  # before another process, perhaps on another machine, reads it

    def _copy_parts(self, room: Callable[[], int] | None) -> None:
        # Pinned memory is rounded up to a power of two.
        needed = sum(part.bytes * (1 + part.is_on_device) for part in self._parts)
        if room is None or needed > room():
            return
        try:
            self._parts = deque([part.copied() for part in self._parts])
        except (RuntimeError, MemoryError):  # the system does not give as much memory
            return
        self._released.set()

    def _hash(self) -> dict[str, str]:
        """The digests of this process's share of the files, when all have written."""
        assert self._folder is not None
        files = [file for planned in self._files.values() for file in planned]
        files.sort(key=lambda file: (-file.size, file.name))
        mine = files[self._writers.rank :: self._writers.count]
        return {file.name: sha256_of(self._folder / file.name) for file in mine}

    def _open_files(self) -> TensorFiles:
        planned = [file for files in self._files.values() for file in files]
        return TensorFiles(self._folder or self._place, planned)
