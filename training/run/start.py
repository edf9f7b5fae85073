"""Where an attempt begins: its directory, and the snapshot that all processes resume from."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from config.schema import Config
from config.stored import as_plain, as_yaml
from data.corpus import Corpus
from data.public_names import public_name
from snapshot.base import Base
from snapshot.disk.checking import check_snapshot
from snapshot.disk.folder import (
    TEMPORARY_PREFIX,
    manifest_entries,
    manifest_sha256,
    prune,
    remove_leftovers,
    snapshots_in,
    verify,
    write_whole,
)
from snapshot.disk.state import RunState, read_state
from snapshot.errors import OtherRun, SnapshotError
from snapshot.source import find
from snapshot.start import ORIGIN, Start, choose_start
from store.fetch import ALL, PARTIAL, SMALL, Contents, StateCheck, remove_partial
from store.records import METRICS
from training.distributed.agreement import (
    decided_by_main,
    is_on_any,
    local_main_first,
    run_on_all,
    run_on_main,
)
from training.distributed.environment import is_one_machine
from training.reporting.metrics import MetricsFile
from training.run.run_dir import CONFIG_FILE, RunLock, not_writable, refuse_foreign
from training.run.same_run import refuse_other_run
from training.run.text import begin_stream, data_facts
from training.run.uploading import store_of


def lock_run_dir(accelerator: Accelerator, config: Config, lock: RunLock) -> None:
    """Keep other attempts out of the run's directory. Every process must call this.

    Raises ConfigError as `RunLock.acquire` and `refuse_foreign` do.
    """
    run_dir = Path(config.run.dir)

    def check() -> None:
        if accelerator.is_local_main_process:
            refuse_foreign(run_dir)

    if not accelerator.is_main_process:
        lock.leave_code_in(None)  # the main process's refusal is not this machine's exit code
    run_on_all(accelerator, check)
    run_on_main(accelerator, lambda: lock.acquire(run_dir))
    if is_one_machine():
        return
    # Some shared disks have locks that only count on one machine.
    mark = run_dir / decided_by_main(accelerator, lambda: _leave_mark(run_dir))

    def acquire() -> bool:
        """Whether this is the first process of a machine with a disk of its own."""
        first = accelerator.is_local_main_process and not accelerator.is_main_process
        if not first or mark.exists():
            return False
        lock.acquire_on_other_machine(run_dir)
        return True

    lock.own_disks = is_on_any(accelerator, run_on_all(accelerator, acquire))
    run_on_main(accelerator, lambda: mark.unlink(missing_ok=True))


def _leave_mark(run_dir: Path) -> str:
    """Create a file by which another machine knows that it sees the main process's disk."""
    mark = f"{TEMPORARY_PREFIX}main-{uuid.uuid4().hex[:8]}"
    (run_dir / mark).touch()
    return mark


def agree_on_start(accelerator: Accelerator, config: Config, lock: RunLock) -> Start:
    """Choose the snapshot that this attempt resumes from; the main process chooses and verifies.

    Every process must call this. Where machines have disks of their own, all use the same. Of a
    snapshot that is only on the Hub, no more than the small files are downloaded: `take_start`
    follows when the text is known. Raises SnapshotError where a snapshot cannot be used or is
    another run's by the configuration, and where another machine can neither see nor download the
    one that the main process chose.
    """
    refuse = partial(refuse_other_run, config=as_plain(config))
    return _agree(accelerator, config, partial(_choose, config, lock, refuse, SMALL))


def take_start(
    accelerator: Accelerator, config: Config, lock: RunLock, start: Start, corpus: Corpus
) -> Start:
    """Compare the text with the snapshot's, and download what is missing of that.

    Every process must call this. Raises SnapshotError for the text of another run, and as
    `agree_on_start` does.
    """
    refuse = partial(refuse_other_run, config=as_plain(config), data=data_facts(corpus))
    try:
        if start.state is not None:
            refuse(start.state)
        begin_stream(corpus, config, start.state)
    except OtherRun:
        if accelerator.is_local_main_process and not start.is_whole:
            with suppress(OSError):
                remove_partial(snapshots_in(Path(config.run.dir)))
        raise
    if is_on_any(accelerator, not start.is_whole):

        def choose() -> Start:
            return start if start.is_whole else _choose(config, lock, refuse, ALL, start.contents)

        start = _agree(accelerator, config, choose)
        begin_stream(corpus, config, start.state)  # of an older snapshot if the newest is damaged
    return start


def _agree(accelerator: Accelerator, config: Config, choose: Callable[[], Start]) -> Start:
    """The start that the main process chooses, on all machines."""
    start = run_on_main(accelerator, choose)
    facts = decided_by_main(accelerator, lambda: _facts_of(start, config))
    chosen = None if facts is None else Chosen(**facts)
    # The main process has verified its own.
    looks = accelerator.is_local_main_process and not accelerator.is_main_process
    lacks = run_on_all(
        accelerator, lambda: looks and chosen is not None and not chosen.is_here(config)
    )
    theirs = local_main_first(
        accelerator,
        lambda: Start(None, None, "") if chosen is None else chosen.start(config, lacks),
    )
    return theirs if start is None else start


@dataclass(frozen=True)
class Chosen:
    """The snapshot that the main process has chosen, as the other machines look for it."""

    step: int
    identity: str
    """The sha256 of its manifest."""
    place: str
    """Its path below the run's snapshots, or that of the folder that `snapshot.resume` names."""
    remote: str | None
    """Its name in a store, if one has it."""

    def folder(self, config: Config) -> Path:
        """Where a machine has it."""
        return snapshots_in(Path(config.run.dir)) / self.place

    @property
    def is_whole(self) -> bool:
        """False if it is no more yet than the small files."""
        return PARTIAL not in Path(self.place).parts

    def is_here(self, config: Config) -> bool:
        """Whether this machine has it, undamaged."""
        folder = self.folder(config)
        with suppress(SnapshotError, OSError):
            if manifest_sha256(folder) == self.identity:
                if self.is_whole:
                    check_snapshot(folder)
                else:
                    verify(folder, list(filter(SMALL.fullmatch, manifest_entries(folder))))
                return True
        return False

    def start(self, config: Config, lacks: bool) -> Start:
        """The start of a process of another machine, or of this one, which downloads what it lacks.

        Raises SnapshotError where it can neither be seen nor downloaded.
        """
        folder = self.folder(config)
        if lacks:
            if self.remote is None:
                fault = f"{folder} is missing or damaged on this machine"
                raise SnapshotError(f"{fault}: {_remedy(config)}.")
            root = snapshots_in(Path(config.run.dir))
            root = root / ORIGIN if ORIGIN in folder.parts else root
            source = find(self.remote, config.hub.timeout_seconds)
            folder = source.fetch(root, ALL if self.is_whole else SMALL).path
            if self.is_whole:
                prune(root, self.step, config.snapshot.keep)
        if manifest_sha256(folder) != self.identity:
            what = f"{folder} differs from the snapshot of the main process"
            raise SnapshotError(f"{what}. Start again, with one run.dir for all machines.")
        return Start(folder, read_state(folder), "")


def _remedy(config: Config) -> str:
    """What to do where another machine lacks what the main process begins from."""
    if config.snapshot.resume != "auto":
        return "copy it here, or put it on a disk that all machines share"
    if config.hub.store_url is None:
        return "copy it here, give hub.url, or one run.dir on a shared disk"
    return (
        f"copy it here, or start on the first machine alone until it is in {config.hub.store_url}"
    )


def _facts_of(start: Start | None, config: Config) -> dict[str, Any] | None:
    """The fields of `Chosen` for the main process's start; None where it is from scratch."""
    if start is None or start.folder is None or start.state is None:
        return None
    root, folder = snapshots_in(Path(config.run.dir)), start.folder.absolute()
    if start.folder.is_relative_to(root):
        folder = start.folder.relative_to(root)
    return {
        "step": start.state.step,
        "identity": manifest_sha256(start.folder),
        "place": folder.as_posix(),
        "remote": start.remote,
    }


def _choose(
    config: Config,
    lock: RunLock,
    refuse: StateCheck = lambda state: None,
    wanted: re.Pattern[str] = ALL,
    known: Contents | None = None,
) -> Start:
    store = store_of(config)
    if store is not None:
        store = replace(store, for_all=lock.own_disks)
    if store is not None and known is not None:
        store = replace(store, store=known.store, known=known)
    return choose_start(
        Path(config.run.dir),
        config.snapshot.resume,
        store,
        timeout=config.hub.timeout_seconds,
        refuse=refuse,
        wanted=wanted,
    )


def open_run(config: Config, start: Start, lock: RunLock, is_main: bool) -> MetricsFile | None:
    """Write config.yaml and continue metrics.jsonl at `start`, in the main process.

    Each process that has the `lock` removes what was downloaded for this start alone.
    """
    if not lock.is_held:
        return None
    run_dir = Path(config.run.dir)
    try:
        remove_leftovers(snapshots_in(run_dir))  # another run's snapshot, to begin from
        remove_partial(snapshots_in(run_dir))
        if not is_main:
            return None
        write_whole(run_dir / CONFIG_FILE, as_yaml(config))
        # A run that begins from another run's snapshot has no lines of its own yet.
        step = start.state.step if start.is_in(run_dir) and start.state is not None else 0
        return MetricsFile(run_dir / METRICS, step)
    except OSError as error:
        raise not_writable(run_dir, error) from error


def state_at(
    start: Start, config: Config, corpus: Corpus, computed_on: str, base: Base | None
) -> RunState:
    """The run's state at the start of this attempt, with its configuration and machine."""
    attempt = uuid.uuid4().hex
    plain, facts = as_plain(config), data_facts(corpus)
    if start.state is not None:
        return replace(
            start.state, attempt_id=attempt, config=plain, data=facts, computed_on=computed_on
        )
    return RunState(
        run_id=uuid.uuid4().hex,
        attempt_id=attempt,
        step=0,
        epoch=0,
        seed=config.train.seed,
        best_loss=None,
        config=plain,
        data=facts,
        computed_on=computed_on,
        base=None if base is None else public_name(base.name),
    )
