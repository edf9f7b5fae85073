"""Muon's updates of odd matrices by several processes, compared with those of one.

python tests/support/shared_updates.py copies shards parts

Each process prints, as JSON: the largest difference from one process's weights, and the hash of all
weights.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from config.schema import OptimConfig
from model.sharded import gather_full, local_part, slices_of
from optim import muon
from optim.optimizers import OPTIMIZERS

CPU = torch.device("cpu")
SIZES = [*[(5, 7, 1)] * 10, (3, 8, 1), (6, 16, 3), (48, 16, 3), (16, 16, 1), (1, 9, 1)]
"""Rows, columns, and how many matrices are joined. Of 3 rows, a fourth process has none."""
STEPS = 3
muon.STACKED = 300  # so that shapes have more than one batch


def trained(mesh=None) -> list[torch.Tensor]:
    """The weights after a few updates."""
    torch.manual_seed(1)
    model = nn.Module()
    model.matrices = nn.ParameterList(torch.randn(rows, size) for rows, size, _ in SIZES)
    model.others = nn.ParameterList([torch.randn(7, 3), torch.randn(5)])
    model.without_gradient = nn.Parameter(torch.randn(5, 7))
    model.frozen = nn.Parameter(torch.randn(5, 7), requires_grad=False)
    if mesh is not None and "part" in mesh.mesh_dim_names:
        for place, one in enumerate([*model.matrices]):
            # A joined one is several parameters there: its parts would not be those of one.
            lies = Replicate() if SIZES[place][2] > 1 else Shard(place % 2)
            model.matrices[place] = nn.Parameter(sharded(one.data, mesh["part"], [lies]))
        for place, one in enumerate([*model.others]):
            model.others[place] = nn.Parameter(sharded(one.data, mesh["part"], [Replicate()]))
        for name in ("without_gradient", "frozen"):
            whole = sharded(getattr(model, name).data, mesh["part"], [Replicate()])
            setattr(model, name, nn.Parameter(whole, requires_grad=name != "frozen"))
    if mesh is not None:
        of_data = tuple(name for name in mesh.mesh_dim_names if name != "part")
        fully_shard(model, mesh=mesh[of_data])
    parts = {one: joined for one, (*_, joined) in zip(model.matrices, SIZES, strict=True)}
    parts |= dict.fromkeys(model.others, 0) | {model.without_gradient: 1}
    optimizer = OPTIMIZERS["muon"].build(parts, OptimConfig(learning_rate=1e-3), CPU, torch.float32)
    for _ in range(STEPS):
        for one in [*model.matrices, *model.others]:
            whole, one.grad = torch.randn(one.shape), torch.zeros_like(one)
            local_part(one.grad).copy_(whole[slices_of(one)])
        optimizer.step()
    return [gather_full(one) for one in model.parameters()]


def sharded(whole: torch.Tensor, mesh, placements) -> torch.Tensor:
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


if __name__ == "__main__":
    sizes = dict(zip(("replicate", "shard", "part"), map(int, sys.argv[1:]), strict=True))
    dist.init_process_group("gloo")
    mesh = None
    if sizes["shard"] > 1:
        sizes = {name: size for name, size in sizes.items() if size > 1}
        mesh = init_device_mesh("cpu", (*sizes.values(),), mesh_dim_names=(*sizes,))
    together = trained(mesh)
    differences = []
    if dist.get_rank() == 0:
        dist.is_initialized = lambda: False  # as one process
        alone = trained()
        pairs = zip(alone, together, strict=True)
        differences = [float((one - other).abs().max()) for one, other in pairs]
    bits = hashlib.sha256(b"".join(one.contiguous().numpy().tobytes() for one in together))
    result = {"difference": max(differences, default=0.0), "bits": bits.hexdigest()}
    print("updates:", json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()
