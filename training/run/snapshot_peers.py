"""Which processes of a run write its snapshots."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from model.sharded import is_sharded, writes_shard
from snapshot.disk.peers import Peers
from training.distributed.agreement import broadcast_text
from training.distributed.environment import machine_number
from training.reporting.console import Console

GATHERED = (
    "hint      training stalls while the main process gathers every snapshot. FSDP processes write "
    "their own shards if all of them can write to {root}: on one machine, or on a shared disk that "
    "is not NFS."
)


def find_peers(
    accelerator: Accelerator, model: nn.Module, root: Path, timeout: float, console: Console
) -> Peers | None:
    """The processes that write the shards of a model at once; None if it is not sharded.

    After `timeout` seconds without progress one of them is considered lost. Every process must call
    this.
    """
    sharded = [parameter for parameter in model.parameters() if is_sharded(parameter)]
    if not sharded:
        return None

    def gather(numbers: list[int]) -> list[list[int]]:
        mine = torch.tensor([numbers], device=accelerator.device)
        rows: list[list[int]] = accelerator.gather(mine).tolist()
        return rows

    peers = Peers(
        accelerator.process_index,
        machine_number(),
        gather,
        lambda text: broadcast_text(accelerator, text),
        timeout,
    )
    if not peers.find(root, any(map(writes_shard, sharded))):
        console.say(GATHERED.format(root=root))
    return peers
