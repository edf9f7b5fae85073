"""What one machine of a run has and another lacks, sent over the network: snapshot and records.

Machines with disks of their own may have been in the run at different times. Before an attempt
chooses where to begin, the newest snapshot of any machine goes to all that lack it, and the lines
of metrics with it. The processes' own collectives carry the files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast

from config.schema import Config
from snapshot.disk.checking import check_snapshot
from snapshot.disk.files import (
    FILE_NAME,
    MANIFEST,
    folder_name,
    manifest_entries,
    manifest_sha256,
    snapshot_folders,
    snapshots_in,
    verify,
)
from snapshot.disk.pruning import make_way, prune
from snapshot.disk.state import read_state
from snapshot.disk.writing import atomic_folder
from snapshot.errors import SnapshotError
from snapshot.start import METRICS
from store.events import as_text, read_events
from store.records import EVENTS
from training.distributed.agreement import (
    broadcast_text,
    decided_by_main,
    digest_number,
    run_on_all,
)
from training.distributed.environment import is_one_machine
from training.reporting.events import Events
from training.reporting.metrics import has_step, place_after
from training.run.run_dir import RunLock, attempts_in, not_writable, record_attempt
from training.run.start import is_restart

PART_BYTES = 32 << 20
"""Bytes of one message."""
Files = list[tuple[str, int]]
"""Names and sizes."""


class Newest(NamedTuple):
    """The newest snapshot of a machine, in numbers that a tensor holds."""

    step: int = -1
    """-1 if there is none."""
    manifest: int = 0
    run: int = 0
    written: int = 0
    """When, in seconds since 1970."""


NONE = (None, Newest())


def share_newest(accelerator: Accelerator, config: Config, lock: RunLock) -> None:
    """Send the newest whole snapshot of any machine, and its run's metrics, to all that lack them.

    Every process must call this. A machine that shares the main process's disk lacks nothing, and
    a start over (`snapshot.resume=never`) needs nothing. Raises SnapshotError where machines hold
    different runs, or one cannot write the files.
    """
    if is_one_machine() or _starts_over(accelerator, config, lock):
        return
    run_dir, damaged = Path(config.run.dir), set[Path]()
    root = snapshots_in(run_dir)
    while True:
        folder, mine = run_on_all(
            accelerator,
            lambda: _newest(root, damaged) if accelerator.is_local_main_process else NONE,
        )
        rows = [Newest(*row) for row in _gathered(accelerator, mine)]
        trained_last = max(rows, key=lambda row: row.written)
        if trained_last.step < 0:
            return
        run_on_all(accelerator, partial(_refuse_other_run, run_dir, mine, trained_last))
        newest = max(rows, key=lambda row: row.step)  # of several, the main process's
        giver = rows.index(newest)
        lacks = lock.is_held and (mine.step, mine.manifest) != (newest.step, newest.manifest)
        if not _any(accelerator, lacks):
            break
        if (files := _files_of(accelerator, giver, folder, damaged)) is not None:
            parts = _sent(accelerator, giver, folder, files)
            # The main process prunes later, when it knows what uploads and best.json need.
            keep = None if accelerator.is_main_process else config.snapshot.keep
            write = partial(_write_snapshot, root, newest.step, keep, parts)
            _received(accelerator, run_dir, parts, write, lacks)
            break
    _share_metrics(accelerator, run_dir, newest.step, lock.is_held)
    attempts = json.dumps(sorted(attempts_in(run_dir)))
    _record_attempts(run_dir, json.loads(broadcast_text(accelerator, attempts, giver)), lock)


def _starts_over(accelerator: Accelerator, config: Config, lock: RunLock) -> bool:
    """Whether `snapshot.resume=never` means to use no snapshot. Every process must call this.

    That depends on the main process's newest, as `snapshot.start.choose_start` sees it; without
    one, the run resumes if any other machine has one that this command began.
    """
    if config.snapshot.resume != "never":
        return False

    def resumes() -> int:
        root = snapshots_in(Path(config.run.dir))
        folder = _newest(root, set())[0] if lock.is_held else None
        return -1 if folder is None else is_restart(read_state(folder), config, lock.code_before)

    answers = [row[0] for row in _gathered(accelerator, (run_on_all(accelerator, resumes),))]
    return 1 not in (answers if answers[0] < 0 else answers[:1])


def share_records(accelerator: Accelerator, config: Config, lock: RunLock) -> None:
    """Add the main process's events and attempts to those of each machine with a disk of its own.

    Every process must call this. Another machine may have the main process next time.
    """
    if is_one_machine():
        return
    run_dir = Path(config.run.dir)

    def records() -> tuple[str, list[str]]:
        return as_text(read_events(run_dir / EVENTS)), sorted(attempts_in(run_dir))

    events, attempts = decided_by_main(accelerator, records)
    if lock.is_held and not accelerator.is_main_process:
        with suppress(OSError):  # a full disk costs them, not the run
            Events(run_dir / EVENTS, "").merge(events.encode())
        _record_attempts(run_dir, attempts, lock)


def _record_attempts(run_dir: Path, attempts: list[str], lock: RunLock) -> None:
    """Whoever takes over from these attempts then knows that they are over."""
    for attempt in attempts if lock.is_held else ():
        record_attempt(run_dir, attempt)


def _newest(root: Path, damaged: set[Path]) -> tuple[Path | None, Newest]:
    """The newest snapshot that can be read. Raises SnapshotError if the folder cannot be read."""
    for folder in snapshot_folders(root):
        if folder not in damaged:
            with suppress(SnapshotError, OSError):
                state, manifest = read_state(folder), manifest_sha256(folder)
                run = hashlib.sha256(state.run_id.encode()).hexdigest()
                written = int((folder / MANIFEST).stat().st_mtime)
                numbers = (state.step, digest_number(manifest), digest_number(run), written)
                return folder, Newest(*numbers)
    return NONE


def _refuse_other_run(run_dir: Path, mine: Newest, trained_last: Newest) -> None:
    """Raise SnapshotError if this machine has another run than the one that was trained last."""
    if mine.step >= 0 and mine.run != trained_last.run:
        raise SnapshotError(
            f"run.dir={run_dir} holds another run on this machine than on the machine that trained "
            "last. Move it away here, or give the run another run.name (and run.dir, if that is "
            "set) on all machines."
        )


def _files_of(
    accelerator: Accelerator, giver: int, folder: Path | None, damaged: set[Path]
) -> Files | None:
    """The files of the giver's snapshot on all processes; None if they are damaged.

    Every process must call this.
    """
    found: list[Any] | None = None
    if accelerator.process_index == giver and folder is not None:
        try:
            check_snapshot(folder)
            sizes = [(name, size) for name, (size, _) in manifest_entries(folder).items()]
            found = [(MANIFEST, (folder / MANIFEST).stat().st_size), *sizes]
        except (SnapshotError, OSError):
            damaged.add(folder)
    told = json.loads(broadcast_text(accelerator, json.dumps(found), giver))
    return None if told is None else [(str(name), int(size)) for name, size in told]


def _sent(
    accelerator: Accelerator, giver: int, folder: Path | None, files: Files
) -> Iterator[tuple[str, bytes]]:
    """The giver's files in parts, by their names, on all processes. Each must take all of them."""
    source = folder if accelerator.process_index == giver else None
    for name, size in files:
        for begin in range(0, size, PART_BYTES):
            content = bytearray(min(PART_BYTES, size - begin))
            if source is not None:
                with suppress(OSError), open(source / name, "rb") as opened:
                    opened.seek(begin)
                    opened.readinto(content)  # what cannot be read fails the check of its hash
            part = torch.frombuffer(content, dtype=torch.uint8).to(accelerator.device)
            yield name, broadcast(part, giver).cpu().numpy().tobytes()


def _received(
    accelerator: Accelerator,
    run_dir: Path,
    parts: Iterator[tuple[str, bytes]],
    write: Callable[[], None],
    lacks: bool,
) -> None:
    """Write the parts where they are lacking. Every process must call this."""

    def take() -> None:
        try:
            if lacks:
                write()
        except OSError as error:
            raise not_writable(run_dir, error) from error
        finally:
            for _ in parts:  # the others wait for each of them
                pass

    run_on_all(accelerator, take)


def _write_snapshot(
    root: Path, step: int, keep: int | None, parts: Iterator[tuple[str, bytes]]
) -> None:
    """Write a snapshot that is whole, or none, and `keep` the newest of all that are there.

    Raises SnapshotError and OSError.
    """
    with atomic_folder(root, folder_name(step), make_way) as building:
        for name, content in parts:
            if name != MANIFEST and FILE_NAME.fullmatch(name) is None:
                raise SnapshotError(
                    f"another machine's manifest lists {name!r}: no snapshot has that"
                )
            with open(building / name, "ab") as opened:
                opened.write(content)
        verify(building)
    if keep is not None:
        prune(root, keep, step)


def _share_metrics(accelerator: Accelerator, run_dir: Path, step: int, takes: bool) -> None:
    """Send metrics.jsonl up to a step to the machines without that step's lines."""
    path = run_dir / METRICS

    def bytes_of_steps() -> int:
        if accelerator.is_local_main_process and has_step(path, step):
            with open(path, "rb") as opened:
                return place_after(opened, step)
        return 0

    size = run_on_all(accelerator, bytes_of_steps)
    lacks = takes and not size
    sizes = [row[0] for row in _gathered(accelerator, (size,))]
    if not _any(accelerator, lacks) or not any(sizes):
        return
    giver = sizes.index(max(sizes))
    parts = _sent(accelerator, giver, run_dir, [(METRICS, sizes[giver])])

    def write() -> None:
        partial = path.with_name(f"{METRICS}.new")
        with open(partial, "wb") as opened:
            for _, content in parts:
                opened.write(content)
        partial.replace(path)

    _received(accelerator, run_dir, parts, write, lacks)


def _gathered(accelerator: Accelerator, numbers: tuple[int, ...]) -> list[list[int]]:
    """The numbers of all processes, by rank. Every process must call this."""
    mine = torch.tensor([numbers], dtype=torch.int64, device=accelerator.device)
    rows: list[list[int]] = accelerator.gather(mine).tolist()
    return rows


def _any(accelerator: Accelerator, here: bool) -> bool:
    """Whether something holds on any process. Every process must call this."""
    return any(row[0] for row in _gathered(accelerator, (int(here),)))
