"""The shapes of a run by name: what its processes share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import runs


class Shape(NamedTuple):
    """A shipped config file with another machine, and what a run in it prints."""

    config: str
    processes: int
    groups: int
    """Groups of processes that get different sequences."""
    strategy: str
    """What the header says of it."""
    changes: Mapping[str, object] = MappingProxyType({})
    """Other entries of the config file."""

    def file(self, folder: Path) -> Path:
        """Its config file, in a folder."""
        return runs.rehearsal(self.config, folder, self.processes, **self.changes)

    def is_named_in(self, printed: str) -> bool:
        """Whether a run in float32 prints that it has this shape."""
        counted = "1 process, CPU with 1 thread"
        if self.processes > 1:
            counted = f"{self.processes} processes, CPU with 1 thread each"
        return f"{counted}, float32{self.strategy}\n" in printed


SHARED_SEQUENCES = ", each sequence shared by 2 processes"
SHARED_MATRICES = ", each matrix shared by 2 processes"
FSDP = ", FSDP"
REPLICAS = ", FSDP (2 replicas of {} shards)"
CP, TP = {"parallelism_config_cp_size": 2}, {"parallelism_config_tp_size": 2}
SHARDS = {"parallelism_config_dp_shard_size": 2}
SHAPES = {
    "1": Shape("cpu.yaml", 1, 1, ""),
    "DDP 2": Shape("ddp_cpu.yaml", 2, 2, ", DDP"),
    "FSDP 2": Shape("fsdp_cpu.yaml", 2, 2, FSDP),
    "hybrid 2 x 2": Shape("fsdp_hybrid_cpu.yaml", 4, 4, REPLICAS.format(2)),
    "tp 2": Shape("tp_cpu.yaml", 2, 1, FSDP + SHARED_MATRICES),
    "tp 2 x shard 2": Shape("fsdp_tp_cpu.yaml", 4, 2, FSDP + SHARED_MATRICES),
    "cp 2": Shape("cp_cpu.yaml", 2, 1, FSDP + SHARED_SEQUENCES),
    "cp 2 x shard 2": Shape("cp_cpu.yaml", 4, 2, FSDP + SHARED_SEQUENCES, SHARDS),
    "cp 2 x tp 2": Shape("tp_cpu.yaml", 4, 1, FSDP + SHARED_SEQUENCES + SHARED_MATRICES, CP),
}
MORE_SHAPES = {
    "hybrid 2 x 2 x cp 2": Shape(
        "fsdp_hybrid_cpu.yaml", 8, 4, REPLICAS.format(4) + SHARED_SEQUENCES, CP
    ),
    "hybrid 2 x 2 x tp 2": Shape(
        "fsdp_hybrid_cpu.yaml", 8, 4, REPLICAS.format(2) + SHARED_MATRICES, TP
    ),
}
"""Combinations of those."""
