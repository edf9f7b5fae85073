"""Processes that share each sequence compute the loss and the gradients of one that has it all."""

from __future__ import annotations

import json

import pytest
import torch

import runs
from model.causal_lm import PACKING
from model.context import Context
from model.families import FAMILIES

SCRIPT = runs.ROOT / "tests" / "support" / "contexts.py"


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_family_has_the_loss_and_gradients_of_one_process(tmp_path, processes):
    file, found = runs.rehearsal("ddp_cpu.yaml", tmp_path, processes), tmp_path / "found.json"
    result = runs.run(runs.launch_command(file, str(found), script=SCRIPT))
    assert result.returncode == 0, result.stderr
    content = json.loads(found.read_text())
    assert content.pop("processes") == processes
    assert len(content) == len(FAMILIES) + len(PACKING)
    # transformers computes gemma2's scores itself, in no function that can be replaced.
    assert [name for name, kinds in content.items() if not kinds] == ["their gemma2"]
    for name, kinds in content.items():
        for kind, (loss, gradient) in kinds.items():
            assert loss < 2e-6, (name, kind)
            assert gradient < 1e-5, (name, kind)


class Group:
    """A process group of which only the size and the rank are asked."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = lambda: size, lambda: rank


def test_each_position_belongs_to_one_process_and_work_is_equal():
    places = torch.arange(48)[None]
    for size in (1, 2, 3, 4):
        own = [Context(Group(size, rank)).own(places)[0] for rank in range(size)]
        assert torch.cat(own).sort().values.equal(places[0])
        assert len({int((part + 1).sum()) for part in own}) == 1  # keys that its queries see
