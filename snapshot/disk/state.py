"""A run's state, written to a snapshot and restored: weights, optimizer, and `state.json`."""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from model.cpu.layers import WAYS
from model.family import LanguageModel
from model.layout import Stored
from model.sharded import reshard
from snapshot.config_values import value_of
from snapshot.disk.contents import STATE, check_contents
from snapshot.disk.entries import by_stem, shapes_of, weight_entries
from snapshot.disk.files import (
    LARGEST_STEP,
    SNAPSHOT_NAME,
    folder_name,
    read_json,
    step_of,
    verify,
    write_json,
)
from snapshot.disk.numbers import NumberChecks
from snapshot.disk.optimizer_state import moment_entries, restore_moments
from snapshot.disk.pending import PendingSnapshot
from snapshot.disk.placing import place_tensors
from snapshot.disk.ranks import Ranks
from snapshot.disk.reference import (
    ADAPTERS,
    CONFIG,
    WHOLE,
    BaseReference,
    read_reference,
    stem_of,
)
from snapshot.disk.staging import StagingBuffer
from snapshot.disk.state_parts import is_cursor, is_loss_scaler
from snapshot.disk.tensors import TensorReader, read_into
from snapshot.errors import SnapshotError

FORMAT_VERSION = 1
PACKAGES = ("torch", "accelerate", "datasets", "safetensors", "tokenizers", "numpy")


@dataclass
class RunState:
    """`state.json`. All randomness follows from seed and step, so it holds no generator state."""

    run_id: str
    attempt_id: str
    step: int
    epoch: int
    seed: int
    best_loss: float | None
    """The lowest held-out loss before this snapshot, nats per token."""
    config: dict[str, Any]
    data: dict[str, Any]
    """name, fingerprint, characters, vocabulary, unit, held_out_tokens, held_out_bytes."""
    origin: str | None = None
    """Manifest sha256 of the snapshot of another run that this run started from."""
    loss_scaler: dict[str, float] | None = None
    """State of fp16's GradScaler; None in other precisions."""
    skipped_steps: int = 0
    """Steps so far whose update the loss scaler skipped because a gradient overflowed."""
    computed_on: str | None = None
    """Processes, device, precision and torch of the attempt: the last bits depend on them."""
    attention: str | None = None
    """How a CPU computes it: products or kernel; None where that was never chosen."""
    base: str | None = None
    """The model that the run began from: repo@commit or folder; None for random weights."""
    stream: list[dict[str, Any]] | None = None
    """Of each source of a streamed text: source, revision, held_out_groups (1.0 if it is missing),
    epoch, window, row, token, blocks."""

    def update_best_loss(self, loss: float) -> None:
        """Record a held-out loss, if it is the lowest so far."""
        self.best_loss = loss if self.best_loss is None else min(loss, self.best_loss)


def versions() -> dict[str, str]:
    """Versions of the packages in use, for information: nothing depends on them."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


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


def read_state(folder: Path) -> RunState:
    """Read `state.json` of a verified snapshot. Raises SnapshotError if it is not valid."""
    state = state_in(read_json(folder / STATE), str(folder))
    if SNAPSHOT_NAME.fullmatch(folder.name) and step_of(folder) != state.step:
        raise SnapshotError(f"{folder} holds step {state.step}, not the step of its name")
    return state


def state_in(content: Any, folder: str) -> RunState:
    """The content of `state.json`. Raises SnapshotError, which names `folder`, if it is invalid."""
    found = content.get("format_version") if isinstance(content, dict) else None
    if type(found) is not int or found != FORMAT_VERSION:
        raise SnapshotError(
            f"{folder} has format version {found}; this program reads version {FORMAT_VERSION}"
        )
    expected: dict[str, type | tuple[type, ...]] = {
        "run_id": str,
        "attempt_id": str,
        "step": int,
        "epoch": int,
        "seed": int,
        "best_loss": (float, int, type(None)),
        "config": dict,
        "data": dict,
        "origin": (str, type(None)),
        "loss_scaler": (dict, type(None)),
        "skipped_steps": int,
        "computed_on": (str, type(None)),
        "attention": (str, type(None)),
        "base": (str, type(None)),
        "stream": (list, type(None)),
    }
    for name in ("computed_on", "attention", "base", "stream"):  # older snapshots lack them
        content.setdefault(name, None)
    for name, kind in expected.items():
        value = content.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise SnapshotError(f"{folder}/{STATE} has no valid {name}")
    state = RunState(**{entry.name: content[entry.name] for entry in fields(RunState)})
    if not 1 <= state.step <= LARGEST_STEP or not 0 <= state.epoch <= LARGEST_STEP:
        raise SnapshotError(f"{folder}/{STATE} has no valid step and epoch")
    if not 0 <= state.seed < 2**32 or not 0 <= state.skipped_steps <= state.step:
        raise SnapshotError(f"{folder}/{STATE} has no valid seed and skipped_steps")
    if state.best_loss is not None and not math.isfinite(state.best_loss):
        raise SnapshotError(f"{folder}/{STATE} has no valid best_loss")
    if state.loss_scaler is not None and not is_loss_scaler(state.loss_scaler):
        raise SnapshotError(f"{folder}/{STATE} has no valid loss_scaler")
    if state.attention not in (None, *WAYS):
        raise SnapshotError(f"{folder}/{STATE} has no valid attention")
    if state.stream is not None and not all(map(is_cursor, state.stream)):
        raise SnapshotError(f"{folder}/{STATE} has no valid stream")
    return state


@torch.no_grad()
def restore(folder: Path, model: LanguageModel, optimizer: Optimizer) -> None:
    """Load the weights and the state of the same optimizer of a verified snapshot, bit by bit.

    Every process must call this; it reads only its own slices, without a collective. A snapshot
    with a base needs a model that has the weights of the base. Raises SnapshotError if a tensor is
    missing or has another shape.
    """
    layout = model.layout()
    restore_weights(folder, model, stem_of(read_reference(folder)))
    restore_moments(folder, layout, optimizer, value_of(read_state(folder).config, "optim.name"))


@torch.no_grad()
def restore_weights(folder: Path, model: LanguageModel, stem: str = WHOLE) -> None:
    """Load the weights alone, from a snapshot or from a model of the Hub.

    Every process must call this; it reads only its own slices, without a collective. Files of a
    `stem` for a part of the weights leave the others as they are. Raises SnapshotError if a tensor
    is missing or has another shape.
    """
    layout = model.layout()
    with TensorReader(folder, stem) as reader:
        if stem == ADAPTERS:
            for name, parameter in layout.adapters().items():
                read_into(parameter, reader, Stored((name,)))
            return
        stored = reader.find(layout)
        for name, parameter in layout.parameters().items():
            if name in stored:
                read_into(parameter, reader, stored[name])
            elif stem == WHOLE:
                raise SnapshotError(f"{folder} does not hold {name}")


def check_snapshot(folder: Path) -> RunState:
    """Verify a whole snapshot, hashes and contents; its state. Raises SnapshotError."""
    numbers = NumberChecks()
    verify(folder, inspector_for=numbers.inspector_for)
    state = read_state(folder)
    check_contents(folder, state.config)
    numbers.check_updates(folder, state.step, state.skipped_steps)
    return state
