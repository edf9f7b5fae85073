"""The start of an attempt: its text, its directory, and the snapshot that all processes resume."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from config.schema import Config
from config.stored import as_plain, as_yaml
from data.corpus import Corpus, prepare_corpus
from data.errors import DataError
from data.public_names import public_name
from data.tokenizer import CHARACTERS
from model.cpu.cores import cores
from snapshot.base import Base
from snapshot.disk.files import manifest_sha256, remove_leftovers, snapshots_in, write_whole
from snapshot.disk.pruning import prune
from snapshot.disk.state import RunState, check_snapshot, read_state
from snapshot.errors import SnapshotError
from snapshot.fetched import fetch_remote_snapshot
from snapshot.model_repo import check_model_repo
from snapshot.resume import choose_start, folder_for_step
from snapshot.start import RemoteSnapshot, Start, StateCheck, any_state
from snapshot.start_over import check_can_move_aside
from store.fetch import remove_partial
from training.distributed.agreement import (
    broadcast_text,
    equal_on_all,
    local_main_first,
    run_on_all,
    run_on_main,
)
from training.reporting.metrics import MetricsFile
from training.reporting.output import say_error
from training.run.pretrained import PretrainedModel
from training.run.restart import is_restart
from training.run.run_dir import CONFIG_FILE, refuse_foreign
from training.run.run_lock import RunLock, not_writable
from training.run.same_run import data_facts
from training.run.streams import is_streamed_text, stream_text
from training.run.tokenizer import tokenizer_folder
from training.run.uploading import model_repo_of, store_of


def prepare_text(
    accelerator: Accelerator, config: Config, pretrained: PretrainedModel | None
) -> Corpus:
    """Prepare the corpus once on each machine, where the first process verifies it.

    Of a streamed text only held-out rows are read here. Every process must call this. Raises
    DataError when the machines have different texts.
    """
    data, first = config.data, accelerator.is_local_main_process
    base = None if pretrained is None else pretrained.base
    if is_streamed_text(accelerator, config):
        return stream_text(accelerator, config, base)
    corpus = local_main_first(
        accelerator,
        lambda: prepare_corpus(
            data.source,
            text_column=data.text_column,
            val_fraction=data.val_fraction,
            block_size=data.block_size,
            cache_dir=Path(data.cache_dir),
            tokenizer=tokenizer_folder(config, base),
            documents=data.documents,
            threads=cores(),
            verify=first,
            say=say_error if first else None,
        ),
    )
    if not equal_on_all(accelerator, corpus.info.fingerprint):
        other = data.tokenizer != CHARACTERS
        same = f", or data.tokenizer={data.tokenizer} is not the same tokenizer" if other else ""
        raise DataError(f"data.source={data.source} is not the same text{same} on all machines.")
    return corpus


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
    if accelerator.is_local_main_process and not accelerator.is_main_process:
        lock.acquire_on_other_machine(run_dir)


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


def agree_on_start(
    accelerator: Accelerator, config: Config, lock: RunLock, refuse: StateCheck
) -> Start:
    """Choose the snapshot that this attempt resumes from; the main process chooses and verifies.

    Every process must call this. Where machines have disks of their own, one process on each
    downloads what it lacks from the Hub. Raises SnapshotError where a snapshot cannot be used, what
    `refuse` raises for its state, and SnapshotError where another machine can neither see nor
    download the one that the main process chose.
    """
    start, proposed = _propose(
        accelerator, config, lambda: _choose(config, lock, use_local=True, refuse=refuse)
    )
    lacks = run_on_all(accelerator, lambda: _lacks(accelerator, proposed, config))
    anybody = accelerator.gather(torch.tensor([int(lacks)], device=accelerator.device)).any()
    can_fetch = proposed is None or proposed["place"] is not None
    if anybody and not can_fetch and store_of(config) is not None:
        # Only the first machine has that snapshot: take one that all machines can download.
        first = start
        start, proposed = _propose(
            accelerator, config, lambda: _choose_for_all(config, lock, first, refuse)
        )
        lacks = run_on_all(accelerator, lambda: _lacks(accelerator, proposed, config))
    theirs = local_main_first(accelerator, lambda: _same_start(proposed, config, lacks))
    return theirs if start is None else start


def _propose(
    accelerator: Accelerator, config: Config, choose: Callable[[], Start]
) -> tuple[Start | None, dict[str, Any] | None]:
    """The main process's choice (None on the others), and what all processes need to know of it."""

    def choice() -> tuple[Start, str]:
        start = choose()
        return start, _proposal(start, config)

    chosen = run_on_main(accelerator, choice)
    text = broadcast_text(accelerator, None if chosen is None else chosen[1])
    return None if chosen is None else chosen[0], json.loads(text)


def _choose(
    config: Config,
    lock: RunLock,
    use_local: bool,
    refuse: StateCheck = any_state,
) -> Start:
    run_dir = Path(config.run.dir)
    start = choose_start(
        run_dir,
        config.snapshot.resume,
        store_of(config),
        use_local=use_local,
        timeout=config.hub.timeout_seconds,
        is_restart=lambda state: is_restart(state, config, lock.code_before),
        refuse=refuse,
    )
    if start.state is not None:  # before another machine downloads it
        refuse(start.state)
    if not lock.is_in(run_dir):  # snapshot.resume=never has moved the directory aside
        lock.acquire(run_dir)
    model_repo = model_repo_of(config)
    return start if model_repo is None else check_model_repo(model_repo, start)


def _choose_for_all(
    config: Config, lock: RunLock, first: Start | None, refuse: StateCheck
) -> Start:
    """A start that every machine can download; the first choice is on one machine's disk."""
    assert first is not None
    assert first.state is not None
    start = _choose(config, lock, use_local=False, refuse=refuse)
    if start.state is not None and start.state.run_id == first.state.run_id:
        lost = f"step {first.state.step} is on the first machine's disk only, and not on the Hub"
        return replace(
            start,
            reason=f"{start.folder}, the newest that all machines can have",
            warnings=(*start.warnings, f"{lost}; the run goes back to step {start.state.step}."),
        )
    raise SnapshotError(
        f"only the first machine has a snapshot of this run, in {config.run.dir}, and "
        "the Hub has none. Copy it to the other machines, or start on "
        "the first alone until it is uploaded."
    )


def _proposal(start: Start, config: Config) -> str:
    if start.folder is None or start.state is None:
        return json.dumps(None)
    root = snapshots_in(Path(config.run.dir))
    inside = start.folder.relative_to(root) if start.folder.is_relative_to(root) else None
    return json.dumps(
        {
            "inside": None if inside is None else str(inside),
            "step": start.state.step,
            "identity": manifest_sha256(start.folder),
            "place": None if start.remote is None else vars(start.remote),
        }
    )


def _folder_of(proposed: dict[str, Any], config: Config) -> Path:
    if proposed["inside"] is not None:
        return snapshots_in(Path(config.run.dir)) / str(proposed["inside"])
    return folder_for_step(Path(config.snapshot.resume).expanduser(), proposed["step"])


def _lacks(accelerator: Accelerator, proposed: dict[str, Any] | None, config: Config) -> bool:
    """Whether this machine lacks the proposed snapshot, or has a damaged one.

    The first process of each machine checks; the main process has verified its own.
    """
    if proposed is None or accelerator.is_main_process or not accelerator.is_local_main_process:
        return False
    folder = _folder_of(proposed, config)
    try:
        check_snapshot(folder)
        return manifest_sha256(folder) != proposed["identity"]
    except (SnapshotError, OSError):
        return True


def _same_start(proposed: dict[str, Any] | None, config: Config, lacks: bool) -> Start:
    if proposed is None:
        return Start(None, None, "")
    folder = _folder_of(proposed, config)
    if lacks:
        if proposed["place"] is None:
            raise SnapshotError(
                f"{folder} is missing or differs on this machine: every machine must see the same "
                "run.dir. Put it on a shared disk, or give the run a hub.repo_id."
            )
        folder = fetch_remote_snapshot(RemoteSnapshot(**proposed["place"]), folder.parent)
        prune(folder.parent, config.snapshot.keep, proposed["step"])
    if manifest_sha256(folder) != proposed["identity"]:
        what = f"{folder} differs from the snapshot of the main process"
        raise SnapshotError(f"{what}. Start again, with one run.dir for all machines.")
    return Start(folder, read_state(folder), "")


def open_run(run_dir: Path, config: Config, start: Start) -> MetricsFile:
    """Write config.yaml and continue metrics.jsonl at `start`. Only the main process calls this."""
    try:
        write_whole(run_dir / CONFIG_FILE, as_yaml(config))
        # A run that begins from another run's snapshot has no lines of its own yet.
        own = start.folder is not None and start.folder.parent == snapshots_in(run_dir)
        step = start.state.step if own and start.state is not None else 0
        remove_leftovers(snapshots_in(run_dir))  # another run's snapshot, to begin from
        remove_partial(snapshots_in(run_dir))
        return MetricsFile(run_dir / "metrics.jsonl", step)
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
