"""Processes that share each matrix compute the loss and the gradients of one that has it whole."""

from __future__ import annotations

import pytest
import torch

from model.causal_lm import PACKING
from model.sharded import Cut, cut_like, pieces_of, whole_shape
from process_groups import Group, assert_equal_losses_and_gradients, measured

ADAPTED = ("gpt2", "their llama", "their phi3")
"""With adapters that drop some of their inputs."""


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_family_has_the_loss_and_gradients_of_one_process(tmp_path, processes):
    content = measured("tensors.py", tmp_path, processes)
    plain = {"gpt2", *(f"their {one}" for one in PACKING)}
    assert content.keys() == plain | {f"{one}, adapted" for one in ADAPTED}
    # transformers has no plan for its GPT-2 classes, and experts are not cut.
    assert [name for name, kinds in content.items() if not kinds] == ["their gpt2", "their mixtral"]
    assert_equal_losses_and_gradients(content)


CUTS = [((12, 4), 0, 3), ((7, 4), 0, 1), ((4, 6), 1, 1), ((9,), 0, 3), ((2, 8, 3), 1, 2)]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("shape", "dim", "joined"), CUTS)
def test_parts_make_the_whole_each_number_once(shape, dim, joined, size):
    whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    found = torch.zeros(shape)
    for rank in range(size):
        part = torch.empty(0)
        part.cut = cut = Cut(shape, Group(size, rank), dim, joined)
        part = cut_like(cut.part_of(whole).clone(), part)
        assert part.shape == cut.part_shape
        assert whole_shape(part) == shape
        for local, there in pieces_of(part):
            found[there] += part[local]
    assert found.equal(whole)


def test_a_process_has_whole_heads_of_query_key_and_value():
    rows = torch.arange(3 * 8)[:, None]  # 4 heads of 2
    part = Cut((24, 1), Group(2, 1), 0, 3).part_of(rows)
    assert part[:, 0].tolist() == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]
