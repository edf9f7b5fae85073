"""Writes a snapshot: a whole one appears under its name, or none."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Event

from torch.optim import Optimizer

from model.family import LanguageModel
from model.sharded import reshard
from snapshot.config_values import value_of
from snapshot.disk.folder import atomic_snapshot, flush, folder_name, sha256_of, write_json
from snapshot.disk.model import ADAPTER_CONFIG, ADAPTERS, CONFIG, WHOLE, Adapters
from snapshot.disk.state import FORMAT_VERSION, STATE, RunState, versions
from snapshot.disk.tensor_files import TensorFile, create_files, plan_files
from snapshot.disk.tensors import Part, divide, parts_of_moments, parts_of_weights, shapes_of
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
    weights = parts_of_weights(layout, prefix)
    moments = parts_of_moments(layout, optimizer, value_of(state.config, "optim.name"))
    most = sys.maxsize if prefix == ADAPTERS else piece_bytes  # peft reads a single file
    files = {
        prefix: plan_files(shapes_of(weights), prefix, most),
        "optimizer": plan_files(shapes_of(moments), "optimizer", piece_bytes),
    }
    content = {"format_version": FORMAT_VERSION, **asdict(state)}

    def write_rest(folder: Path) -> None:
        save_rest(folder)
        if adapters is not None:
            write_json(folder / ADAPTER_CONFIG, adapters.content())
        else:
            write_json(folder / CONFIG, model.config.config_json(end_of_text))
        write_json(folder / STATE, {**content, "versions": versions()})

    place = root / folder_name(state.step)
    return Snapshot(place, files, [*weights, *moments], write_rest, writers or Writers())


class Snapshot:
    """One snapshot while it is written, as one process sees it."""

    def __init__(
        self,
        place: Path,
        files: Mapping[str, Sequence[TensorFile]],
        parts: Iterable[Part],
        write_rest: Callable[[Path], None],
        writers: Writers,
    ) -> None:
        """Create the files. Gather and write what the processes cannot write part by part.

        Every process must call this. `place` is the folder that appears when the snapshot is whole.
        `files` by the prefix of their names. `write_rest(folder)` writes those without tensors, in
        the main process. What the disk refuses here is raised by `write`.
        """
        self._place, self._write_rest, self._writers = place, write_rest, writers
        self._files = [file for planned in files.values() for file in planned]
        self._file_of = {name: file for file in self._files for name in file.shapes}
        self._digests: dict[str, str] = {}
        self._folder = place  # until its temporary name is known
        self._fault: OSError | NumberFault | None = None
        self._stack = ExitStack()
        self._released = Event()
        own, gathered = divide(parts, writers.is_main, writers.group is not None)
        self._parts = deque(own)
        """What this process has yet to write."""
        if writers.is_main:
            self._try(partial(self._create, files))
        for part in gathered:  # even if the disk is full: the others wait for each
            whole = part.whole()
            if writers.is_main and self._fault is None:
                self._try(partial(whole.write, self._folder, self._file_of))

    def write(self, room: Callable[[], int] | None = None) -> Path:
        """Complete it, perhaps in a thread; its folder. Raises OSError and SnapshotError.

        If copies of all that this process writes fit into `room()` bytes, they are made first, and
        an update may follow at once. Otherwise it waits until all is written.
        """
        try:
            with self._stack:
                if self._writers.group is None and not self._writers.is_main:
                    return self._place
                (name, *_) = self._writers.on_all(partial(self._prepare, room))
                self._folder = self._place.with_name(name)
                self._writers.on_all(self._write_parts)
                for digests in self._writers.on_all(self._hash):
                    self._digests |= digests
                if self._writers.is_main:
                    self._write_rest(self._folder)
        finally:
            self._parts.clear()
            self._released.set()
        return self._place

    def release(self) -> None:
        """Return when an update may change the tensors: each is written, or copied.

        `write` must be running in another thread.
        """
        self._released.wait()

    def _create(self, files: Mapping[str, Sequence[TensorFile]]) -> None:
        building = atomic_snapshot(self._place.parent, self._place.name, self._digests)
        self._folder = self._stack.enter_context(building)
        for prefix, planned in files.items():
            create_files(self._folder, prefix, planned)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, NumberFault) as fault:
            self._fault = fault

    def _prepare(self, room: Callable[[], int] | None) -> str:
        """Copy what there is room for; the name of the folder, where this process has made it."""
        self._copy_parts(0 if room is None else room())
        if self._fault is not None:
            raise self._fault
        return self._folder.name

    def _copy_parts(self, room: int) -> None:
        if sum(part.bytes_of_copy for part in self._parts) > room:
            return
        with suppress(RuntimeError, MemoryError):  # the system does not give as much memory
            self._parts = deque([part.copied() for part in self._parts])
            self._released.set()

    def _write_parts(self) -> None:
        while self._parts:
            self._parts.popleft().write(self._folder, self._file_of)  # a copy is freed at once
        self._released.set()
        if self._writers.group is not None:  # another, perhaps on another machine, reads it
            flush(self._folder / file.name for file in self._files)

    def _hash(self) -> dict[str, str]:
        """The digests of this process's share of the files, when all have written."""
        files = sorted(self._files, key=lambda file: (-file.size, file.name))
        mine = files[self._writers.rank :: self._writers.count]
        return {file.name: sha256_of(self._folder / file.name) for file in mine}
