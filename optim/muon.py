"""Muon: orthogonalized updates for the matrices of the blocks, AdamW for all other parameters.

Letters in shapes: N matrices of one shape, R rows, r rows of this process, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from model.sharded import is_sharded, local_part
from optim.eager import EagerOptimizer

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the polynomial that moves all singular values to about 1 (Jordan et al., 2024).
"""
ITERATIONS = 4
"""Five, as usual, are no better: benchmarks/RESULTS.md, "Schedules and Muon"."""
ADAMW_RMS = 0.2
"""The usual root mean square of AdamW's updates, to which Muon's are scaled (Liu et al., 2025)."""
STACKED = 1 << 22
"""Numbers of small matrices that a process orthogonalizes at once: one by one is slower."""
MOMENTUM_BUFFER = "momentum_buffer"
"""The name of what is kept of a matrix, as torch has it."""
PARTS = "parts"
"""The entry of a Muon group: how many matrices each of its parameters joins by rows."""


class Muon(EagerOptimizer):
    """Muon for the groups that have `parts`, AdamW for the others, with one learning rate for both.

    The updates of Muon are those of torch.optim.Muon with Nesterov's momentum, `ITERATIONS` and
    `adjust_lr_fn="match_rms_adamw"`, for each of the joined matrices by itself. The processes share
    the matrices of a shape: each orthogonalizes some whole ones. DTensor sends what it lacks of
    them, and then to each process what it updates, so all have the same bits.
    """

    def __init__(
        self,
        adamw: AdamW,
        matrices: list[dict[str, Any]],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Matrices are multiplied on the device, in the dtype."""
        self._adamw, self._device, self._dtype = adamw, device, dtype
        self._replicas: Any = None
        super().__init__([*adamw.param_groups, *matrices], {"lr": adamw.defaults["lr"]})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient. A closure is not supported.

        Every process must call this.
        """
        assert closure is None
        # accelerate replaces groups and state when it prepares the optimizer.
        self._adamw.param_groups = [group for group in self.param_groups if PARTS not in group]
        self._adamw.state = self.state
        self._adamw.step()
        for group in self.param_groups:
            if PARTS in group:
                for alike in self._batches([p for p in group["params"] if p.grad is not None]):
                    self._update(alike, group)

    def _batches(self, parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Parameters of one shape and sharding, as many as all processes orthogonalize at once."""
        groups: dict[Any, list[nn.Parameter]] = {}
        for parameter in parameters:
            lies = getattr(parameter, "placements", None)  # by rows or by columns
            groups.setdefault((parameter.shape, lies), []).append(parameter)
        for (shape, _), alike in groups.items():
            mesh = self._mesh_of(alike[0])
            at_once = max(1, STACKED // shape.numel()) * (1 if mesh is None else mesh.size())
            yield from (alike[i : i + at_once] for i in range(0, len(alike), at_once))

    def _update(self, alike: list[nn.Parameter], group: dict[str, Any]) -> None:
        rows, columns = alike[0].shape
        mixed = torch.stack([self._mixed(one) for one in alike])  # (N, r, C)
        if (mesh := self._mesh_of(alike[0])) is None:
            directions = self._directions(mixed, group[PARTS])
        else:
            from torch.distributed.tensor import DTensor, Shard

            shape = torch.Size((len(alike), rows, columns))
            stride = (rows * columns, columns, 1)
            options: Any = {"shape": shape, "stride": stride, "run_check": False}
            lies = stacked_placements(alike[0], mesh)
            stacked = DTensor.from_local(mixed, mesh, lies, **options)
            # Whole matrices of each process: an all-to-all where parameters are sharded.
            own = stacked.redistribute(placements=[Shard(0)] * mesh.ndim)
            local = self._directions(own.to_local(), group[PARTS])
            computed = DTensor.from_local(local, mesh, own.placements, **options)
            directions = computed.redistribute(placements=lies).to_local()
        # Each of the joined matrices is scaled by its own shape.
        rate = group["lr"] * ADAMW_RMS * math.sqrt(max(rows // group[PARTS], columns))
        for parameter, direction in zip(alike, directions, strict=True):
            weight = local_part(parameter)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.add_(direction.to(weight.device), alpha=-rate)

    def _mixed(self, parameter: nn.Parameter) -> Tensor:
        """Gradient and momentum (r, C) of this process, before they are orthogonalized."""
        state, gradient = self.state[parameter], local_part(parameter.grad)  # type: ignore[arg-type]
        if MOMENTUM_BUFFER not in state:
            state[MOMENTUM_BUFFER] = torch.zeros_like(parameter)
        momentum = local_part(state[MOMENTUM_BUFFER]).lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(momentum, MOMENTUM).to(self._device, self._dtype)

    def _directions(self, matrices: Tensor, parts: int) -> Tensor:
        """Orthogonalized matrices (N, R, C), each of the `parts` that one joins by itself."""
        joined = matrices.unflatten(1, (parts, -1)).flatten(0, 1)
        return orthogonalized(joined).reshape(matrices.shape)

    def _mesh_of(self, parameter: Any) -> Any:
        """The processes that hold a parameter, all of it (DDP) or shards; None if one does."""
        if is_sharded(parameter):
            return parameter.device_mesh
        if self._replicas is None and dist.is_initialized() and dist.get_world_size() > 1:
            from torch.distributed.device_mesh import DeviceMesh

            world: Any = dist.group.WORLD
            self._replicas = DeviceMesh.from_group(world, self._device.type)
        return self._replicas


def stacked_placements(parameter: Any, mesh: Any) -> list[Any]:
    """How parameters (R, C) that lie like this one lie when they are stacked, (N, R, C)."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if not is_sharded(parameter):
        return [Replicate()] * mesh.ndim
    stacked: list[Any] = []
    for lies in parameter.placements:
        if isinstance(lies, _StridedShard):  # rows of tensor parallelism that FSDP shards again
            stacked.append(_StridedShard(lies.dim + 1, split_factor=lies.split_factor))
        else:
            stacked.append(Shard(lies.dim + 1) if lies.is_shard() else lies)
    return stacked


def orthogonalized(matrices: Tensor) -> Tensor:
    """About U V^T for each matrix U S V^T of (N, R, C); most singular values are 0.7 to 1.2.

    `ITERATIONS` steps of a Newton-Schulz iteration, in the precision of the input.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.size(1) > matrices.size(2)
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT  # (N, R, R), or (N, C, C) of tall matrices
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
