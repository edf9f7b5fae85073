"""Writes a snapshot: a whole one appears under its name, or none.

The main process writes alone, or each process what it holds: in threads, while training's
collectives run. So they agree in a process group of their own, of gloo, which nothing else uses.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import torch
from torch.optim import Optimizer

from model.family import LanguageModel
from model.sharded import reshard
from snapshot.config_values import value_of
from snapshot.disk.folder import (
    atomic_snapshot,
    flush,
    folder_name,
    temporary_name,
    write_json,
)
from snapshot.disk.model import ADAPTER_CONFIG, ADAPTERS, CONFIG, MOMENTS, WHOLE, Adapters
from snapshot.disk.state import FORMAT_VERSION, STATE, RunState, versions
from snapshot.disk.tensor_files import TensorFile, create_files, plan_files
from snapshot.disk.tensors import (
    Part,
    parts_of_moments,
    parts_of_weights,
    refuse_other_moments,
    shapes_of,
)
from snapshot.errors import NumberFault

INCOHERENT = ("nfs", "cifs", "smb", "9p", "fuse.sshfs")
"""File systems that may write back the bytes around those of a process: how their names begin."""
NOT_FINITE, OTHER = 1 << 20, 1 << 21
"""What a process tells of an error that is none of the system, whose numbers are smaller."""


@dataclass(frozen=True)
class Writers:
    """Who writes, as one process sees it."""

    rank: int = 0
    group: Any = None
    """The group of all processes, each of which writes what it holds; None: the main process
    gathers and writes everything."""

    @property
    def is_main(self) -> bool:
        """Whether this is the main process, which writes what is not shared."""
        return self.rank == 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """What fails in this block on one process that writes fails on all.

        Each must enter it in the same thread, in the same order. A full disk or a number that is
        not finite is the same error everywhere, anything else an OSError.
        """
        error = None
        try:
            yield
        except Exception as raised:
            error = raised
        code = OTHER if error is not None else 0
        if isinstance(error, NumberFault):
            code = NOT_FINITE
        elif isinstance(error, OSError):
            code = error.errno or OTHER
        code = self.largest(code)
        if error is not None:
            raise error
        if code == NOT_FINITE:
            raise NumberFault("another process has numbers that are not finite")
        if code == OTHER:
            raise OSError("another process could not write its part")
        if code:
            raise OSError(code, os.strerror(code))

    def largest(self, number: int) -> int:
        """The largest of all processes' numbers. Raises OSError if one is gone."""
        if self.group is None:
            return number
        from torch.distributed import ReduceOp, all_reduce

        numbers = torch.tensor(number)
        try:
            all_reduce(numbers, ReduceOp.MAX, self.group)
        except RuntimeError as error:  # gloo's, of a broken connection or the timeout
            gone = "another process that writes a part of it is gone or silent"
            raise OSError(gone) from error
        return int(numbers)

    def end(self) -> None:
        """End the group: it must not outlive the one of training, or the process may abort."""
        if self.group is not None:
            torch.distributed.destroy_process_group(self.group)


def is_coherent(folder: Path) -> bool:
    """Whether processes of several machines may write neighbouring bytes of one file here."""
    mounts = {Path(one.mountpoint): one.fstype for one in psutil.disk_partitions(all=True)}
    at = folder.resolve()  # a link may lead to another file system
    kind = next((mounts[place] for place in (at, *at.parents) if place in mounts), "")
    return not kind.startswith(INCOHERENT)


class Snapshot:
    """One snapshot while it is written, as one process sees it."""

    def __init__(
        self,
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
    ) -> None:
        """Begin the snapshot after `state.step` in `root`; `write` completes it.

        Every process must call this, with its unwrapped model, and `write`. The main process calls
        `save_rest(folder)` for additional files. With `adapters`, they alone are written.
        transformers stops a model of our own at `end_of_text`. A tensor file has at most
        `piece_bytes`, unless one tensor is larger. `write` calls no collective of training, so it
        can run in a background thread during the next steps. Weights and optimizer may change once
        `release` has returned. What the disk refuses here is raised by `write`.

        Raises SnapshotError if there was no update yet, and Unresumable where the optimizer keeps
        something else than a reader expects.
        """
        reshard(model)
        layout, prefix = model.layout(), WHOLE if adapters is None else ADAPTERS
        weights = parts_of_weights(layout, prefix)
        refuse_other_moments(layout, optimizer, value_of(state.config, "optim.name"))
        moments = parts_of_moments(layout, optimizer.state)
        most_bytes = piece_bytes if adapters is None else sys.maxsize  # peft reads a single file
        plans = {
            prefix: plan_files(shapes_of(weights), prefix, most_bytes),
            MOMENTS: plan_files(shapes_of(moments), MOMENTS, piece_bytes),
        }
        self._contents: dict[str, Any] = {
            STATE: {"format_version": FORMAT_VERSION, **asdict(state)}
        }
        if adapters is None:
            self._contents[CONFIG] = model.config.config_json(end_of_text)
        else:
            self._contents[ADAPTER_CONFIG] = adapters.content()
        self._save_rest, self._writers = save_rest, writers or Writers()
        self._place, self._stack = root / folder_name(state.step), ExitStack()
        self._folder = self._place  # until its temporary name is known
        self._files = [file for planned in plans.values() for file in planned]
        self._file_of = {name: file for file in self._files for name in file.shapes}
        self._fault: OSError | NumberFault | None = None
        self._released = Event()
        self._parts: deque[Part] = deque()
        """What this process has yet to write."""
        self._try(lambda: self._create(plans))
        for part in [*weights, *moments]:
            if not part.is_sharded:
                self._parts.extend([part] * self._writers.is_main)
            elif self._writers.group is None or part.written.convert is not None:
                whole = part.whole()  # even if the disk is full: the others wait for each
                self._try(partial(whole.write, self._folder, self._file_of))
            elif part.is_written_here:
                self._parts.append(part)

    def _try(self, work: Callable[[], None]) -> None:
        """In the main process, do some work; `write` raises its first fault."""
        if self._writers.is_main and self._fault is None:
            try:
                work()
            except (OSError, NumberFault) as fault:
                self._fault = fault

    def _create(self, plans: Mapping[str, Sequence[TensorFile]]) -> None:
        whole = atomic_snapshot(self._place.parent, self._place.name)
        self._folder = self._stack.enter_context(whole)
        for prefix, planned in plans.items():
            create_files(self._folder, prefix, planned)

    def write(self, room: Callable[[], int] = lambda: 0) -> Path:
        """Complete it, perhaps in a thread; its folder. Raises OSError and NumberFault.

        If copies of all that this process writes fit into `room()` bytes, they are made first, and
        an update may follow at once. Otherwise it waits until all is written.
        """
        writers = self._writers
        try:
            with self._stack:
                if writers.group is not None or writers.is_main:
                    self._agree_on_folder()
                    with writers.together():
                        self._copy_parts(room())
                        while self._parts:  # a copy is freed at once
                            self._parts.popleft().write(self._folder, self._file_of)
                        self._released.set()
                        if writers.group is not None:  # another, on any machine, reads it
                            flush(self._folder / file.name for file in self._files)
                if writers.is_main:
                    self._save_rest(self._folder)
                    self._contents[STATE]["versions"] = versions()
                    for name, content in self._contents.items():
                        write_json(self._folder / name, content)
        finally:
            self._parts.clear()
            self._released.set()
        return self._place

    def release(self) -> None:
        """Return when an update may change the tensors: each is written, or copied.

        `write` must be running in another thread.
        """
        self._released.wait()

    def _agree_on_folder(self) -> None:
        """Raise the main process's fault so far on all, or tell them its temporary folder."""
        with self._writers.together():
            if self._fault is not None:
                raise self._fault
        number = int(self._folder.name[-8:], 16) if self._writers.is_main else 0
        number = self._writers.largest(number)
        self._folder = self._place.with_name(temporary_name(self._place.name, number))

    def _copy_parts(self, room: int) -> None:
        """Copy what this process writes, if it fits, and let an update go."""
        if sum(part.bytes_of_copy for part in self._parts) <= room:
            with suppress(RuntimeError, MemoryError):  # the system does not give as much memory
                self._parts = deque([part.copied() for part in self._parts])
                self._released.set()
