"""What an optimizer keeps, in a snapshot: written, and read back exactly as it was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from optim.optimizers import STEP
from snapshot.disk.entries import Entry
from snapshot.disk.layout import Layout, Stored
from snapshot.disk.tensors import TensorReader, read_into
from snapshot.errors import SnapshotError


def moment_entries(layout: Layout, optimizer: Optimizer, optimizer_name: Any) -> list[Entry]:
    """What the optimizer of this optim.name keeps of all that is trained, in the file's order.

    Raises SnapshotError before the first update, which fp16's loss scaler may have skipped.
    """
    entries, kept = [], layout.kept(optimizer_name)
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
    kept = layout.kept(name)
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
