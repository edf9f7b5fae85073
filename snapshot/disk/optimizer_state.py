"""What an optimizer keeps, in a snapshot: written, and read back exactly as it was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from model.layout import FLOAT_BYTES, Layout, Stored
from optim.optimizers import STEP, Kept, OptimizerError, kept_by
from snapshot.disk.entries import Entry
from snapshot.disk.tensors import TensorReader, read_into
from snapshot.errors import SnapshotError


def kept_in(layout: Layout, optimizer: Any) -> dict[str, Kept]:
    """Names and shapes of what the optimizer of this optim.name keeps of all that is trained.

    Raises SnapshotError for an optimizer that is unknown, or of which no snapshot is possible.
    """
    try:
        kept = kept_by(optimizer, layout.parts())
    except OptimizerError as error:
        raise SnapshotError(f"optim.name={optimizer!s:.80} {error}") from error
    return {name: kept[one] for name, one in layout.trained().items()}


def moment_counts(layout: Layout, optimizer: str) -> dict[str, int]:
    """How many numbers the optimizer keeps of each number of what is trained."""
    kept, trained = kept_in(layout, optimizer), layout.trained()
    shapes = {name: tuple(one.shape) for name, one in trained.items()}
    return {name: [*of.values()].count(shapes[name]) for name, of in kept.items()}


def snapshot_bytes(layout: Layout, optimizer: str, only_trained: bool) -> int:
    """Bytes of a snapshot's tensors: all weights, or those that are trained, and moments."""
    trained, moments = layout.trained(), moment_counts(layout, optimizer)
    weights = trained if only_trained else layout.parameters()
    numbers = sum(one.numel() for one in weights.values())
    numbers += sum(moments[name] * one.numel() for name, one in trained.items())
    return FLOAT_BYTES * numbers


def moment_entries(layout: Layout, optimizer: Optimizer, optimizer_name: Any) -> list[Entry]:
    """What the optimizer of this optim.name keeps of all that is trained, in the file's order.

    Raises SnapshotError before the first update, which fp16's loss scaler may have skipped.
    """
    entries, kept = [], kept_in(layout, optimizer_name)
    for name, parameter in layout.trained().items():
        state = optimizer.state.get(parameter, {})
        if state.keys() != kept[name].keys():
            raise SnapshotError(f"the optimizer has not updated {name} yet")
        for key, value in sorted(state.items()):
            transposed = layout.is_transposed(name) and value.ndim == 2
            shape = tuple(value.shape)[:: -1 if transposed else 1]
            full = f"{name}.{key}"
            entries.append(Entry("optimizer", {full: value}, {full: shape}, None, transposed))
    return entries


def restore_moments(folder: Path, layout: Layout, optimizer: Optimizer, name: Any) -> None:
    """Give the optimizer of this optim.name what it kept.

    Every process must call this; it reads only its own slices, without a collective.
    """
    kept = kept_in(layout, name)
    group_of = {one: group for group in optimizer.param_groups for one in group["params"]}
    with TensorReader(folder, "optimizer") as reader:
        for name, parameter in layout.trained().items():
            state = optimizer.state[parameter] = {}
            for key, shape in kept[name].items():
                if key == STEP or shape != parameter.shape:
                    # As torch does: the step is on the CPU, unless a kernel of the device reads it.
                    group = group_of[parameter]
                    on_cpu = key == STEP and not (group.get("fused") or group.get("capturable"))
                    device = torch.device("cpu") if on_cpu else parameter.device
                    state[key] = torch.empty(shape, device=device)
                else:
                    state[key] = torch.empty_like(parameter)
                stored = Stored((f"{name}.{key}",), layout.is_transposed(name))
                read_into(state[key], reader, stored)
