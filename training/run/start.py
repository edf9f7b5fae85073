"""Where an attempt begins: its directory, and the snapshot that all processes resume from."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from config.schema import Config, ConfigError
from config.stored import as_plain, as_yaml
from data.corpus import Corpus
from data.public_names import public_name
from snapshot.base import Base
from snapshot.config_values import changed_values
from snapshot.disk.checking import check_snapshot
from snapshot.disk.files import (
    TEMPORARY_PREFIX,
    manifest_entries,
    manifest_sha256,
    snapshots_in,
    verify,
    write_whole,
)
from snapshot.disk.pruning import prune, remove_leftovers
from snapshot.disk.state import RunState, read_state
from snapshot.errors import OtherRun, SnapshotError
from snapshot.run_store import Fetch, RemoteSnapshot, StateCheck
from snapshot.start import (
    METRICS,
    ORIGIN,
    Start,
    check_can_move_aside,
    choose_start,
    folder_for_step,
    from_scratch,
    move_aside,
)
from store.events import read_events
from store.fetch import PARTIAL, RepoContents, fetch, fetch_small, is_small, remove_partial
from store.publish import CURVES
from store.records import EVENTS
from training.distributed.agreement import (
    decided_by_main,
    is_on_any,
    local_main_first,
    run_on_all,
    run_on_main,
)
from training.distributed.environment import is_one_machine, restarted_by_launcher
from training.exits import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER_MISTAKE
from training.reporting.metrics import MetricsFile, has_step
from training.run.pretrained import with_settled_rate
from training.run.run_dir import CONFIG_FILE, RunLock, config_in, not_writable, refuse_foreign
from training.run.same_run import refuse_other_run
from training.run.signals import name_of
from training.run.text import begin_stream, data_facts
from training.run.uploading import store_of


def lock_run_dir(accelerator: Accelerator, config: Config, lock: RunLock) -> None:
    """Keep other attempts out of the run's directory. Every process must call this.

    Raises ConfigError as `RunLock.acquire` and `refuse_foreign` do, SnapshotError where
    `snapshot.resume=never` would move more than a run aside.
    """
    run_dir = Path(config.run.dir)

    def check() -> None:
        if config.snapshot.resume == "never":
            check_can_move_aside(run_dir, read_by(config))
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


def read_by(config: Config) -> Iterator[tuple[str, str]]:
    """The keys that may name folders which a run reads, at each of its starts."""
    data, model = config.data, config.model
    keys = {
        "model.pretrained": model.pretrained,
        "model.architecture": model.architecture,
        "data.source": data.source,
        "data.tokenizer": data.tokenizer,  # perhaps derived from the model
    }
    yield from ((key, value) for key, value in keys.items() if value is not None)
    yield from (("data.mix", part.source) for part in data.mix)


def agree_on_start(accelerator: Accelerator, config: Config, lock: RunLock) -> Start:
    """Choose the snapshot that this attempt resumes from; the main process chooses and verifies.

    Every process must call this. Where machines have disks of their own, all use the same. Of a
    snapshot that is only on the Hub, no more than the small files are downloaded, and nothing is
    moved: `take_start` follows when the text is known. Raises SnapshotError where a snapshot cannot
    be used or is another run's by the configuration, and where another machine can neither see nor
    download the one that the main process chose.
    """
    refuse = partial(refuse_other_run, config=as_plain(config))
    return _agree(accelerator, config, partial(_choose, config, lock, refuse, fetch_small))


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
            return start if start.is_whole else _choose(config, lock, refuse, fetch, start.repo)

        start = _agree(accelerator, config, choose)
        begin_stream(corpus, config, start.state)  # of an older snapshot if the newest is damaged
    return start


def start_over(accelerator: Accelerator, config: Config, lock: RunLock, start: Start) -> Start:
    """Move aside what `snapshot.resume=never` starts over, when nothing else is wrong.

    Each machine with a disk of its own does. Every process must call this. Raises SnapshotError if
    it cannot be moved.
    """
    run_dir = Path(config.run.dir)
    main_moves = is_on_any(accelerator, start.moves_aside)

    def over() -> Start:
        mine, is_new = start, config.snapshot.resume == "never" and start.folder is None
        if is_new and lock.is_held and not accelerator.is_main_process:
            # This disk may have another run than the main process's, or a part of that one.
            again = not main_moves and is_restart(None, config, lock.code_before)
            mine = from_scratch(run_dir, None, again)
        moved = move_aside(mine, run_dir)
        if lock.is_held:
            _hold(lock, config)
        return moved

    return run_on_all(accelerator, over)


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
    place: str | None
    """Its path below the run's snapshots; None if `snapshot.resume` names a folder."""
    remote: dict[str, Any] | None
    """The fields of a RemoteSnapshot, if the Hub has it."""

    def folder(self, config: Config) -> Path:
        """Where a machine has it."""
        if self.place is None:
            return folder_for_step(Path(config.snapshot.resume).expanduser(), self.step)
        return snapshots_in(Path(config.run.dir)) / self.place

    @property
    def is_whole(self) -> bool:
        """False if it is no more yet than what `fetch_small` downloads."""
        return self.place is None or PARTIAL not in Path(self.place).parts

    def is_here(self, config: Config) -> bool:
        """Whether this machine has it, undamaged."""
        folder = self.folder(config)
        with suppress(SnapshotError, OSError):
            if manifest_sha256(folder) == self.identity:
                if self.is_whole:
                    check_snapshot(folder)
                else:
                    verify(folder, [name for name in manifest_entries(folder) if is_small(name)])
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
            remote = RemoteSnapshot(**self.remote)
            folder = remote.fetch_to(root, fetch if self.is_whole else fetch_small)
            if self.is_whole:
                prune(root, config.snapshot.keep, self.step)
        if manifest_sha256(folder) != self.identity:
            what = f"{folder} differs from the snapshot of the main process"
            raise SnapshotError(f"{what}. Start again, with one run.dir for all machines.")
        return Start(folder, read_state(folder), "")


def _remedy(config: Config) -> str:
    """What to do where another machine lacks what the main process begins from."""
    if config.snapshot.resume not in ("auto", "never"):
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
    root, place = snapshots_in(Path(config.run.dir)), None
    if start.folder.is_relative_to(root):
        place = start.folder.relative_to(root).as_posix()
    return {
        "step": start.state.step,
        "identity": manifest_sha256(start.folder),
        "place": place,
        "remote": None if start.remote is None else asdict(start.remote),
    }


def _hold(lock: RunLock, config: Config) -> None:
    """Lock the directory anew if it was moved aside, by this attempt or by another one."""
    if not lock.is_in(Path(config.run.dir)):
        lock.acquire(Path(config.run.dir))


def _choose(
    config: Config,
    lock: RunLock,
    refuse: StateCheck = lambda state: None,
    fetch: Fetch = fetch,
    known: RepoContents | None = None,
) -> Start:
    store = store_of(config)
    if store is not None:
        store = replace(store, for_all=lock.own_disks)
    if store is not None and known is not None:  # what it has waited for counts, too
        store = replace(store, hub=known.hub, known=known)
    start = choose_start(
        Path(config.run.dir),
        config.snapshot.resume,
        store,
        timeout=config.hub.timeout_seconds,
        is_restart=lambda state: is_restart(state, config, lock.code_before),
        refuse=refuse,
        fetch=fetch,
    )
    _hold(lock, config)
    return start


def is_restart(state: RunState | None, config: Config, code_before: int | None) -> bool:
    """Whether this command, with `snapshot.resume=never`, restarts the run that it began itself.

    Then a launcher, a job or a loop starts the next attempt. It began the run of a state, and the
    run has not ended: it is not done, and nobody stopped it with Ctrl-C. Without a state, the run
    is the one in the run's directory, if it has no snapshot yet. `code_before` is the exit code of
    the start before this one; None if it left none.
    """
    run_dir = Path(config.run.dir)
    before = _config_without_snapshot(run_dir, config) if state is None else state.config
    if before is None or changed_values(before, as_plain(with_settled_rate(config))):
        return False
    if restarted_by_launcher():
        return True
    if code_before in (None, EXIT_USER_MISTAKE):
        # It was killed, or it was refused and says nothing about the run, or that is on the Hub.
        steps = 0 if state is None else state.step
        return steps < config.train.max_steps and not _stopped_by_a_person(run_dir)
    return code_before not in (EXIT_DONE, EXIT_INTERRUPTED)


def _config_without_snapshot(run_dir: Path, config: Config) -> dict[str, Any] | None:
    """The configuration of a run that has not reached its first snapshot; None for any other."""
    every = config.snapshot.every
    with suppress(ConfigError, OSError):
        if isinstance(every, int) and config.snapshot.every_minutes is None:
            has_saved = has_step(run_dir / METRICS, every)
        else:
            has_saved = (run_dir / CURVES).exists()  # drawn after each snapshot
        return None if has_saved else config_in(run_dir)
    return None


def _stopped_by_a_person(run_dir: Path) -> bool:
    """Whether the last attempt that began has noted that Ctrl-C stopped it."""
    kinds = ("start", "stop", "end")
    events = [one for one in read_events(run_dir / EVENTS) if one["event"] in kinds]
    return bool(events) and events[-1]["text"] == name_of(signal.SIGINT)


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
