"""Sharded tensors: which process writes them, and what is counted of them.

Weights that processes draw, write and read together: tests/unit/snapshot/test_shards.py, and in
tests/promises test_new_weights.py and test_any_snapshot.py.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import families
from model.causal_lm import CausalLMConfig
from model.families import build_empty
from model.family import parameter_count
from model.gpt import GPTConfig
from model.sharded import writes_shard
from snapshot.disk.tensors import snapshot_bytes

SIZES = {
    "gpt2": GPTConfig(vocab_size=97, block_size=64, n_layer=2, n_head=4, n_embd=96),
    "llama": CausalLMConfig.read({**families.FAMILIES["llama tied"], "vocab_size": 97}),
}


@pytest.mark.parametrize("kinds", [*product([False, True], repeat=2)], ids=str)
def test_one_process_of_those_that_have_the_same_writes_it(kinds):
    """Of replicas of FSDP, and of processes that share matrices and have all of this one."""
    writes = []
    for place in product(range(2), range(2)):
        shard = SimpleNamespace(
            full_tensor=None,
            device_mesh=SimpleNamespace(ndim=2, get_coordinate=lambda at=place: [*at]),
            placements=[SimpleNamespace(is_replicate=lambda kind=kind: kind) for kind in kinds],
        )
        writes += [place] if writes_shard(shard) else []
    assert writes == [*product(*(range(1 if kind else 2) for kind in kinds))]


@pytest.mark.parametrize("family", SIZES)
def test_counts_are_those_of_the_whole_model(family):
    whole, part = (build_empty(SIZES[family]) for _ in range(2))
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    part.share_matrices(init_device_mesh("cpu", (2,)))
    dist.destroy_process_group()
    assert parameter_count(part) == parameter_count(whole)
    assert part.flops_per_token(64) == whole.flops_per_token(64)
    one, other = part.layout(), whole.layout()
    assert snapshot_bytes(one, "adamw") == snapshot_bytes(other, "adamw")
    part.refuse_undescribed()
