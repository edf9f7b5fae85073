"""Muon's updates of odd matrices by several processes, compared with those of one.

python tests/support/shared_updates.py copies shards

Each process prints, as JSON: the largest difference from one process's weights, the hash of all
weights, and the FLOP of its own matrices and of all.
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
from torch.distributed.tensor import distribute_tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from model.sharded import gather_full, local_part, pieces_of
from optim import muon
from optim.optimizers import OPTIMIZERS, UsualSettings
from optim.sharing import Work

CPU = torch.device("cpu")
SIZES = [*[(5, 7, 1)] * 10, (3, 8, 1), (6, 16, 3), (48, 16, 3), (16, 16, 1), (1, 9, 1)]
"""Rows, columns, and how many matrices are joined. Of 3 rows, a fourth process has none."""
STEPS = 3
muon.STACKED = 300  # so that shapes have more than one batch


def trained(work: Work, mesh=None) -> tuple[list[torch.Tensor], int]:
    """The weights after a few updates, and the FLOP of what this process orthogonalized."""
    torch.manual_seed(1)
    model = nn.Module()
    model.matrices = nn.ParameterList(torch.randn(rows, size) for rows, size, _ in SIZES)
    model.others = nn.ParameterList([torch.randn(7, 3), torch.randn(5)])
    model.without_gradient = nn.Parameter(torch.randn(5, 7))
    model.frozen = nn.Parameter(torch.randn(5, 7), requires_grad=False)
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    parts = {one: joined for one, (*_, joined) in zip(model.matrices, SIZES, strict=True)}
    parts |= dict.fromkeys(model.others, 0) | {model.without_gradient: 1}
    optimizer = OPTIMIZERS["muon"](parts, UsualSettings(), work)
    flop = 0

    def counted(matrices: torch.Tensor) -> torch.Tensor:
        nonlocal flop
        less, more = sorted(matrices.shape[1:])
        flop += len(matrices) * muon.ITERATIONS * (4 * less * less * more + 2 * less**3)
        return original(matrices)

    original, muon.orthogonalized = muon.orthogonalized, counted
    for _ in range(STEPS):
        for one in [*model.matrices, *model.others]:
            one.grad = torch.randn(one.shape)
            if mesh is not None:
                one.grad = distribute_tensor(one.grad, mesh, one.placements, src_data_rank=None)
        optimizer.step()
    muon.orthogonalized = original
    for one in model.parameters():  # the rows of a shard are where torch has them
        whole = gather_full(one)
        for piece in pieces_of(one):
            assert whole[piece.whole].equal(local_part(one)[piece.local])
    return [gather_full(one) for one in model.parameters()], flop


if __name__ == "__main__":
    copies, shards = map(int, sys.argv[1:])
    dist.init_process_group("gloo")
    assert dist.get_world_size() == copies * shards
    mesh = None
    if shards > 1:
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (copies, shards), mesh_dim_names=names)
        mesh = mesh["shard"] if copies == 1 else mesh
    alone, every = trained(Work(CPU))
    together, own = trained(Work(CPU, group=dist.group.WORLD), mesh)
    differences = [
        float((one - other).abs().max()) for one, other in zip(alone, together, strict=True)
    ]
    bits = hashlib.sha256(b"".join(one.contiguous().numpy().tobytes() for one in together))
    result = {"difference": max(differences), "bits": bits.hexdigest(), "own": own, "all": every}
    print("updates:", json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()
