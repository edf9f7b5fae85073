"""A run's state to a snapshot and back: weights, optimizer, and what cannot be derived."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from model.gpt import GPT
from snapshot.errors import SnapshotError
from snapshot.files import (
    SNAPSHOT_NAME,
    folder_name,
    read_json,
    step_of,
    verify,
    write_json,
    written_whole,
)
from snapshot.gather import gather_full
from snapshot.gpt2_layout import gpt2_config, is_transposed, to_file
from snapshot.tensors import TensorReader, write_tensors

FORMAT_VERSION = 1
LARGEST_STEP = 10**12
STATE = "state.json"
MOMENTS = ("exp_avg", "exp_avg_sq")
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
    """The lowest held-out loss so far, nats per token."""
    config: dict[str, Any]
    data: dict[str, Any]
    """name, fingerprint, characters, vocabulary."""
    origin: str | None = None
    """Identity of the snapshot of another run that this run started from."""


def versions() -> dict[str, str]:
    """What this snapshot was made with, for people: nothing depends on it."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def write_snapshot(
    root: Path,
    state: RunState,
    model: GPT,
    optimizer: Optimizer,
    save_tokenizer: Callable[[Path], None],
    *,
    writer: bool,
    piece_bytes: int,
) -> Path:
    """Write the snapshot after `state.step` below `root`.

    Every process must call this, with its unwrapped model; the one with `writer` writes, the others
    help to gather what is sharded. Raises OSError on the writer when the disk does not take it; the
    snapshots that were there are then still there.
    """
    if not writer:
        _write_tensor_files(None, model, optimizer, piece_bytes)
        return root / folder_name(state.step)
    with written_whole(root, folder_name(state.step)) as folder:
        _write_tensor_files(folder, model, optimizer, piece_bytes)
        save_tokenizer(folder)
        write_json(folder / "config.json", gpt2_config(asdict(model.config)))
        content = {"format_version": FORMAT_VERSION, **asdict(state), "versions": versions()}
        write_json(folder / STATE, content)
    return root / folder_name(state.step)


def read_state(folder: Path) -> RunState:
    """The facts of a verified snapshot. Raises SnapshotError where they are of another format."""
    content = read_json(folder / STATE)
    if not isinstance(content, dict) or content.get("format_version") != FORMAT_VERSION:
        found = content.get("format_version") if isinstance(content, dict) else None
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
    }
    for name, kind in expected.items():
        value = content.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise SnapshotError(f"{folder / STATE} has no proper {name}")
    state = RunState(**{entry.name: content[entry.name] for entry in fields(RunState)})
    if not 1 <= state.step <= LARGEST_STEP or not 0 <= state.seed < 2**32:
        raise SnapshotError(f"{folder / STATE} has no proper step and seed")
    if state.best_loss is not None and not math.isfinite(state.best_loss):
        raise SnapshotError(f"{folder / STATE} has no proper best_loss")
    if SNAPSHOT_NAME.fullmatch(folder.name) and step_of(folder) != state.step:
        raise SnapshotError(f"{folder} holds step {state.step}, not the one of its name")
    return state


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
    """Verify a snapshot that the user named, and read its facts. Raises SnapshotError."""
    verify(folder)
    return read_state(folder)


def _write_tensor_files(
    folder: Path | None, model: GPT, optimizer: Optimizer, piece_bytes: int
) -> None:
    parameters = dict(model.named_parameters())  # tied weights once
    write_tensors(
        folder,
        "model",
        {
            name: parameter.numel() * parameter.element_size()
            for name, parameter in parameters.items()
        },
        lambda name: to_file(name, gather_full(parameters[name])).cpu(),
        piece_bytes,
    )
    moments: dict[str, tuple[str, Tensor]] = {}
    for name, parameter in parameters.items():
        for key, value in sorted(optimizer.state[parameter].items()):
            moments[f"{name}.{key}"] = (name, value)
    write_tensors(
        folder,
        "optimizer",
        {key: tensor.numel() * tensor.element_size() for key, (_, tensor) in moments.items()},
        lambda key: _moment_to_file(*moments[key]),
        piece_bytes,
    )


def _moment_to_file(name: str, value: Tensor) -> Tensor:
    full = gather_full(value)
    return (to_file(name, full) if full.ndim else full.clone()).cpu()


def _read_into(target: Tensor, reader: TensorReader, name: str, transposed: bool) -> None:
    stored = reader.slice_of(name)
    shape = list(target.shape)
    if stored.get_shape() != (shape[::-1] if transposed else shape):
        raise SnapshotError(f"{name} has the shape {stored.get_shape()}, the model needs {shape}")
    tensor = stored[...]
    target.copy_(tensor.t() if transposed else tensor)
