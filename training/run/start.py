"""Where an attempt begins: the snapshot that all processes resume from, which must be its run's."""

from __future__ import annotations

import uuid
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from config.schema import Config
from config.stored import as_plain
from data.corpus import Corpus
from data.public_names import public_name
from model.frozen import AUTO, FLOAT32
from snapshot.config_values import as_argument, value_of
from snapshot.disk.checking import check_snapshot
from snapshot.disk.folder import manifest_sha256, prune, remove_leftovers, snapshots_in, step_of
from snapshot.disk.model import trains_adapters
from snapshot.disk.state import RunState, read_state
from snapshot.errors import OtherRun, SnapshotError
from snapshot.named_model import NamedModel
from snapshot.source import find
from snapshot.start import Start, choose_start
from training.distributed.launcher import is_one_machine
from training.distributed.processes import decided_by_main, local_main_first
from training.run.records import store_of
from training.run.run_dir import RunLock
from training.run.text import data_facts

MUST_MATCH = (
    "model.pretrained",
    "model.architecture",
    "data.block_size",
    "data.documents",
    "model.n_layer",
    "model.n_head",
    "model.n_embd",
    "model.activation_function",
    "model.lora_rank",
    "model.lora_alpha",
    "model.lora_targets",
    "optim.freeze",
    "optim.name",
    "train.global_batch_size",
    "train.seed",
)
"""Keys that decide the model, the optimizer's state and the global batches: with another value it
is another run."""


def agree_on_start(accelerator: Accelerator, config: Config, lock: RunLock) -> Start:
    """Choose the snapshot that this attempt resumes from; the main process chooses and verifies.

    Every process must call this. Where machines have disks of their own, each uses its own copy or
    downloads it. Raises SnapshotError where a snapshot cannot be used or is another run's by the
    configuration, and where another machine can neither see nor download the chosen one.
    """
    run_dir, start = Path(config.run.dir), Start(None, None, "")
    root = snapshots_in(run_dir)

    def choose() -> list[str | None]:
        """The chosen one's identity, its folder as others see it, and its name in a store."""
        nonlocal start
        store = store_of(config)
        start = choose_start(
            run_dir,
            config.snapshot.resume,
            None if store is None else replace(store, for_all=lock.own_disks),
            timeout=config.hub.timeout_seconds,
            refuse=partial(refuse_other_run, config=as_plain(config)),
        )
        if (folder := start.folder) is None:
            return []
        place = folder.relative_to(root) if folder.is_relative_to(root) else folder.absolute()
        return [manifest_sha256(folder), place.as_posix(), start.remote]

    chosen = decided_by_main(accelerator, choose)
    if not chosen:
        return start
    identity, place, remote = chosen
    folder = root / str(place)

    def on_this_machine() -> Start:
        if accelerator.is_main_process:
            return start
        if accelerator.is_local_main_process:  # of another machine
            remove_downloads(config, lock)  # that were cut off, and may fill the disk
            fetch_chosen(folder, str(identity), remote, config)
        if manifest_sha256(folder) != identity:
            what = f"{folder} differs from the snapshot of the main process"
            raise SnapshotError(f"{what}. Start again, with one run.dir for all machines.")
        return Start(folder, read_state(folder), "")

    return on_this_machine() if is_one_machine() else local_main_first(accelerator, on_this_machine)


def fetch_chosen(folder: Path, identity: str, remote: str | None, config: Config) -> None:
    """Download the snapshot with this manifest's sha256, unless it lies in the folder as a whole.

    Raises SnapshotError where no store has it.
    """
    with suppress(SnapshotError, OSError):
        if manifest_sha256(folder) == identity:
            check_snapshot(folder)
            return
    if remote is None:
        raise SnapshotError(
            f"{folder} is missing or damaged on this machine: copy it here, put it on a disk that "
            "all machines share, or give hub.url."
        )
    newest = step_of(find(remote, config.hub.timeout_seconds).fetch(folder.parent).path)
    prune(folder.parent, newest, config.snapshot.keep)


def remove_downloads(config: Config, lock: RunLock) -> None:
    """Remove what was downloaded for this start alone, in each process that has the `lock`."""
    if lock.is_held:
        remove_leftovers(snapshots_in(Path(config.run.dir)))  # such as another run's snapshot


def state_at(
    start: Start, config: Config, corpus: Corpus, computed_on: str, base: NamedModel | None
) -> RunState:
    """The run's state at the start of this attempt, with its configuration and machine."""
    plain, facts, state = as_plain(config), data_facts(corpus), start.state
    if state is None:
        state = RunState(
            run_id=uuid.uuid4().hex,
            attempt_id="",
            step=0,
            epoch=0,
            seed=config.train.seed,
            best_loss=None,
            config=plain,
            data=facts,
            base=None if base is None else public_name(base.name),
        )
    attempt = uuid.uuid4().hex
    return replace(state, attempt_id=attempt, config=plain, data=facts, computed_on=computed_on)


def refuse_other_run(
    state: RunState, config: dict[str, Any], data: dict[str, Any] | None = None
) -> None:
    """Raise OtherRun with all differences, if the snapshot belongs to another run.

    `data` are the `data_facts` of the text. Without them only the configuration is compared, which
    needs nothing but the state: before the rest of a snapshot is downloaded.
    """
    pairs = {key: (value_of(state.config, key), value_of(config, key)) for key in MUST_MATCH}
    if trains_adapters(state.config):
        # The state has a digest of their base, which is checked when that is opened. So it may lie
        # in another place now.
        del pairs["model.pretrained"]
    frozen_dtype = value_of(config, "model.frozen_dtype")
    if frozen_dtype != AUTO:  # which keeps what the run began with
        pairs["model.frozen_dtype"] = (state.frozen_dtype or FLOAT32, frozen_dtype)
    text, facts = [], state.data
    if data is not None:
        pairs["vocabulary"] = (facts.get("vocabulary"), data["vocabulary"])
        if facts.get("fingerprint") != data["fingerprint"]:
            before, now = (value_of(values, "data.tokenizer") for values in (state.config, config))
            pairs["data.tokenizer"] = (before, now)
            if before == now:  # otherwise the text may be the same: this is of its tokens
                text.append(
                    f"text: {facts.get('name')} ({str(facts.get('fingerprint'))[:8]}) in the "
                    f"snapshot, {data['name']} ({data['fingerprint'][:8]}) now, or another "
                    "data.val_fraction, data.window_bytes or data.mix, or data.held_out_split"
                )
    differences = [
        f"{key}: {as_argument(before)} in the snapshot, {as_argument(now)} now"
        for key, (before, now) in pairs.items()
        if before != now
    ] + text
    if differences:
        raise OtherRun(
            f"the snapshot of step {state.step} belongs to another run:\n  "
            + "\n  ".join(differences)
            + "\nRestore these values, or give the new run another run.name (and hub.repo_id). To "
            "begin that one from these weights, set model.pretrained=<this run or repo>."
        )
