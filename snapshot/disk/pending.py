"""A snapshot that has begun: who writes what of it, and how it is completed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from snapshot.disk.entries import (
    Entry,
    Part,
    gathered_parts,
    needs_gathering,
    own_parts,
    whole_parts,
)
from snapshot.disk.numbers import NumberChecks
from snapshot.disk.placing import Placement
from snapshot.disk.ranks import HASHED, WRITTEN, Markers, Ranks, shares
from snapshot.disk.staging import PendingParts, StagingBuffer
from snapshot.disk.tensor_files import TensorFiles, create_files
from snapshot.disk.writing import atomic_snapshot, inspected_sha256


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
