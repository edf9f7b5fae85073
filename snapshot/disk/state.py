"""A run's state to a snapshot and back: weights, optimizer, and what cannot be derived."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from model.gpt import GPT
from snapshot.disk.contents import MOMENTS, check_contents
from snapshot.disk.files import (
    LARGEST_STEP,
    SNAPSHOT_NAME,
    atomic_snapshot,
    folder_name,
    read_json,
    step_of,
    verify,
    write_json,
)
from snapshot.disk.gpt2_layout import gpt2_config, is_transposed, to_file
from snapshot.disk.numbers import Numbers
from snapshot.disk.sharded import gather_full, is_sharded, local_part, local_place, reshard
from snapshot.disk.tensors import TensorReader, write_tensors
from snapshot.errors import SnapshotError

FORMAT_VERSION = 1
STATE = "state.json"
PACKAGES = ("torch", "accelerate", "datasets", "safetensors", "tokenizers", "numpy")


@dataclass
class RunState:
    """`state.json`. Everything random is derived from seed and step, so no generator is in it."""

    run_id: str
    attempt_id: str
    step: int
    epoch: int
    seed: int
    best_loss: float | None
    """The lowest held-out loss before this snapshot, nats per token."""
    config: dict[str, Any]
    data: dict[str, Any]
    """name, fingerprint, characters, vocabulary."""
    origin: str | None = None
    """Identity of the snapshot of another run that this run started from."""
    loss_scaler: dict[str, float] | None = None
    """State of fp16's GradScaler; None in other precisions."""
    skipped_steps: int = 0
    """Steps so far whose update the loss scaler left out, because a gradient overflowed."""
    computed_on: str | None = None
    """Processes, device, precision and torch of this attempt, on which the last bits depend."""

    def update_best_loss(self, loss: float) -> None:
        """Keep the lowest held-out loss."""
        self.best_loss = loss if self.best_loss is None else min(loss, self.best_loss)


def versions() -> dict[str, str]:
    """What this snapshot was made with, for people: nothing depends on it."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def begin_snapshot(
    root: Path,
    state: RunState,
    model: GPT,
    optimizer: Optimizer,
    save_rest: Callable[[Path], None],
    *,
    writer: bool,
    piece_bytes: int,
) -> Callable[[], Path]:
    """Begin the snapshot after `state.step` below `root`; what is returned does the rest.

    Every process must call this, with its unwrapped model; the one with `writer` writes, and calls
    `save_rest(folder)` for the files that are not ours; the others help to gather what is sharded.
    The rest waits for no other process, so it may be done in another thread, beside the next
    forward and backward pass: until it has ended, neither weights nor optimizer may change.

    Both raise OSError on the writer when the disk does not take it, SnapshotError when it holds
    numbers from which nothing can go on; the snapshots that were there are then still there.
    """
    place = root / folder_name(state.step)
    reshard(model)
    files = {"model": _weights(model), "optimizer": _moments(model, optimizer)}
    sharded = any(map(is_sharded, model.parameters()))
    gathered = _gathered(files, writer)
    content = {"format_version": FORMAT_VERSION, **asdict(state)}
    rest = ExitStack()

    def write_files(folder: Path) -> None:
        for stem, tensors in files.items():
            write_tensors(folder, stem, _sizes(tensors), gathered, piece_bytes)

    try:
        if writer:
            with ExitStack() as begun:
                folder = begun.enter_context(atomic_snapshot(root, place.name, Numbers().of))
                if sharded:
                    write_files(folder)
                rest = begun.pop_all()
    finally:
        # Also when the disk is full: the others wait for this process's share of every tensor.
        for _ in gathered if sharded else ():
            pass

    def finish() -> Path:
        with rest:
            if writer:
                if not sharded:
                    write_files(folder)
                save_rest(folder)
                write_json(folder / "config.json", gpt2_config(asdict(model.config)))
                write_json(folder / STATE, {**content, "versions": versions()})
        return place

    return finish


def read_state(folder: Path) -> RunState:
    """The facts of a verified snapshot. Raises SnapshotError where they are of another format."""
    content = read_json(folder / STATE)
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
    }
    content.setdefault("computed_on", None)  # which older snapshots lack
    for name, kind in expected.items():
        value = content.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise SnapshotError(f"{folder / STATE} has no proper {name}")
    state = RunState(**{entry.name: content[entry.name] for entry in fields(RunState)})
    if not 1 <= state.step <= LARGEST_STEP or not 0 <= state.epoch <= LARGEST_STEP:
        raise SnapshotError(f"{folder / STATE} has no proper step and epoch")
    if not 0 <= state.seed < 2**32 or state.skipped_steps < 0:
        raise SnapshotError(f"{folder / STATE} has no proper seed and skipped_steps")
    if state.best_loss is not None and not math.isfinite(state.best_loss):
        raise SnapshotError(f"{folder / STATE} has no proper best_loss")
    if state.loss_scaler is not None and not _is_loss_scaler(state.loss_scaler):
        raise SnapshotError(f"{folder / STATE} has no proper loss_scaler")
    if SNAPSHOT_NAME.fullmatch(folder.name) and step_of(folder) != state.step:
        raise SnapshotError(f"{folder} holds step {state.step}, not the one of its name")
    return state


def _is_loss_scaler(content: dict[str, Any]) -> bool:
    """Whether it is what torch's GradScaler takes back."""
    names = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
    return set(content) == names and all(
        type(value) in (int, float) and math.isfinite(value) and value >= 0
        for value in content.values()
    )


@torch.no_grad()
def restore(folder: Path, model: GPT, optimizer: Optimizer) -> None:
    """Put the weights and the optimizer state of a verified snapshot into place, bit by bit.

    Every process calls this for itself. Raises SnapshotError where a tensor is missing or has
    another shape.
    """
    restore_weights(folder, model)
    with TensorReader(folder, "optimizer") as reader:
        for name, parameter in model.named_parameters():
            moments = {moment: torch.empty_like(parameter) for moment in MOMENTS}
            for moment, target in moments.items():
                _read_into(target, reader, f"{name}.{moment}", is_transposed(name))
            # Where torch keeps it: beside the parameter when fused, else on the CPU.
            fused = optimizer.param_groups[0].get("fused")
            taken = reader.slice_of(f"{name}.step")[...]
            step = taken.to(parameter.device) if fused else taken.clone()
            optimizer.state[parameter] = {"step": step, **moments}


@torch.no_grad()
def restore_weights(folder: Path, model: nn.Module) -> None:
    """The weights alone, as sampling needs them."""
    with TensorReader(folder, "model") as reader:
        for name, parameter in model.named_parameters():
            _read_into(parameter, reader, name, is_transposed(name))


def check_snapshot(folder: Path) -> RunState:
    """Whether a snapshot is whole and holds what it must; its facts. Raises SnapshotError."""
    numbers = Numbers()
    verify(folder, inspect=numbers.of)
    state = read_state(folder)
    check_contents(folder)
    numbers.check_updates(folder, state.step, state.skipped_steps)
    return state


Tensors = dict[str, tuple[str, Tensor]]
"""By the name in the file: the parameter that decides the layout, and the tensor (or a shard)."""


def _weights(model: GPT) -> Tensors:
    return {name: (name, parameter) for name, parameter in model.named_parameters()}  # tied: once


def _moments(model: GPT, optimizer: Optimizer) -> Tensors:
    known = [parameter in optimizer.state for parameter in model.parameters()]
    assert all(known), "the optimizer knows other parameters than the model"
    return {
        f"{name}.{key}": (name, value)
        for name, parameter in model.named_parameters()
        for key, value in sorted(optimizer.state[parameter].items())
    }


def _sizes(tensors: Tensors) -> dict[str, int]:
    """Bytes of the whole of each tensor."""
    return {key: tensor.numel() * tensor.element_size() for key, (_, tensor) in tensors.items()}


def _gathered(files: dict[str, Tensors], writer: bool) -> Iterator[Tensor]:
    """Each tensor whole, one at a time, in the order of the files; for the writer, as they hold it.

    Nothing is held while the next is gathered: one whole tensor is all that is added to a shard.
    On a CPU it may be the weight or moment itself, which stays as it is until all is written.
    """
    for tensors in files.values():
        for name, tensor in tensors.values():
            whole = gather_full(tensor)
            if not writer:
                yield whole
            elif is_sharded(tensor):
                yield to_file(name, whole).cpu()
            else:  # perhaps beside a step that fills the device: transposed where it goes to
                yield to_file(name, whole.cpu())


def _read_into(target: Tensor, reader: TensorReader, name: str, transposed: bool) -> None:
    stored = reader.slice_of(name)
    shape, place = list(target.shape), local_place(target)
    if transposed:
        shape, place = shape[::-1], place[::-1]
    if stored.get_shape() != shape:
        raise SnapshotError(f"{name} has the shape {stored.get_shape()}, the model needs {shape}")
    mine = local_part(target)
    if mine.numel():  # of a small tensor among many processes, some have none
        tensor = stored[place]
        mine.copy_(tensor.t() if transposed else tensor)
