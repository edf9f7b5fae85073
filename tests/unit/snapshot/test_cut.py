"""Parameters that tensor parallelism cuts are drawn, written and read as those of one process.

Here one process has the parts of all. Real ones, also where the main process gathers:
test_shards.py, and in tests/promises test_new_weights.py and test_any_snapshot.py.
"""

from __future__ import annotations

from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import families
from model.causal_lm import CausalLMConfig
from model.families import build_empty
from model.family import ModelConfig, parameter_count
from model.gpt import GPTConfig
from model.sharded import Cut, numbers_in, whole_shape, writes_shard
from model.tensor import TensorGroup
from optim.optimizers import OPTIMIZERS, UsualSettings
from optim.sharing import Work
from process_groups import Group
from snapshot.disk.load import restore_moments, restore_weights
from snapshot.disk.tensor_files import TensorFiles, create_files, plan_files
from snapshot.disk.tensors import (
    divide,
    entries_of_moments,
    entries_of_weights,
    moment_counts,
    shapes_of,
    snapshot_bytes,
)

# Of a vocabulary of 97, processes have different numbers of rows.
SIZES: dict[str, ModelConfig] = {
    "gpt2": GPTConfig(vocab_size=97, block_size=64, n_layer=2, n_head=4, n_embd=96),
    "llama": CausalLMConfig.read(
        {**families.FAMILIES["llama tied"], "vocab_size": 97, "hidden_size": 64}
    ),
    "qwen3": CausalLMConfig.read(
        {**families.FAMILIES["qwen3"], "vocab_size": 97, "num_key_value_heads": 4}
    ),
}
EACH = pytest.mark.parametrize("family", SIZES)


def models(family: str, processes: int) -> list:
    """The model as each process has it, without values."""
    found = [build_empty(SIZES[family]) for _ in range(processes)]
    for rank, model in enumerate(found if processes > 1 else []):
        model.share_matrices(TensorGroup(Group(processes, rank)))
        model.mark_cuts()
    return found


def drawn(family: str, processes: int) -> list:
    found = models(family, processes)
    for model in found:
        model.draw_new_weights(seed=7)
    return found


def optimizer_of(model):
    settings, work = UsualSettings(learning_rate=1e-2), Work(torch.device("cpu"))
    return OPTIMIZERS["adamw"](model.layout().parts(), settings, work)


def update(model, optimizer, seed: int) -> None:
    """An update whose gradients are those of the whole model."""
    generator = torch.Generator().manual_seed(seed)
    for one in model.layout().trained().values():
        whole = torch.randn(whole_shape(one), generator=generator)
        cut = getattr(one, "cut", Cut(whole.shape, Group(1, 0)))
        one.grad = cut.part_of(whole)
    optimizer.step()


def trained(family: str, processes: int) -> tuple[list, list]:
    """The models, and their optimizers, after two updates."""
    found = drawn(family, processes)
    optimizers = [optimizer_of(model) for model in found]
    for model, optimizer in zip(found, optimizers, strict=True):
        for seed in (1, 2):
            update(model, optimizer, seed)
    return found, optimizers


def shared(model, optimizer, processes: int) -> tuple[list, list]:
    """What each of several processes would have of a model and its optimizer's state."""
    found = models(next(name for name, one in SIZES.items() if one == model.config), processes)
    optimizers = [optimizer_of(one) for one in found]
    for part, its in zip(found, optimizers, strict=True):
        for whole, one in zip(model.parameters(), part.parameters(), strict=True):
            one.data = one.cut.part_of(whole.data).clone()
            its.state[one] = {
                key: one.cut.part_of(value) if value.ndim else value
                for key, value in optimizer.state[whole].items()
            }
    return found, optimizers


def write(folder, some: list, optimizers: list) -> bytes:
    """The bytes of the files that all processes write, each its own pieces."""
    folder.mkdir()
    kinds = {
        "model": [entries_of_weights(model.layout(), "model") for model in some],
        "optimizer": [
            entries_of_moments(model.layout(), optimizer, "adamw")
            for model, optimizer in zip(some, optimizers, strict=True)
        ],
    }
    for prefix, entries in kinds.items():
        assert all(shapes_of(one) == shapes_of(other) for one, other in pairwise(entries))
        planned = plan_files(shapes_of(entries[0]), prefix, 10**9)
        create_files(folder, prefix, planned)
        for rank, of_process in enumerate(entries):
            own, gathered = divide(of_process, rank == 0, each_writes=True)
            assert not gathered
            with TensorFiles(folder, planned) as files:
                for part in own:
                    part.write(files)
    return b"".join((folder / f"{prefix}.safetensors").read_bytes() for prefix in kinds)


@pytest.mark.parametrize("dim", [None, 0])
@pytest.mark.parametrize("is_replicate", [False, True])
def test_one_process_of_those_that_have_the_same_writes_it(dim, is_replicate):
    """Also of replicas of FSDP."""
    writes = []
    for replica in range(2):
        for rank in range(2):
            shard = SimpleNamespace(
                full_tensor=None,
                cut=Cut((8, 8), Group(2, rank), dim),
                device_mesh=SimpleNamespace(ndim=1, get_coordinate=lambda at=replica: [at]),
                placements=[SimpleNamespace(is_replicate=lambda: is_replicate)],
            )
            writes += [(replica, rank)] if writes_shard(shard) else []
    replicas, ranks = range(1 if is_replicate else 2), range(1 if dim is None else 2)
    assert writes == [*product(replicas, ranks)]


@EACH
@pytest.mark.parametrize("processes", [2, 4])
def test_new_weights_are_parts_of_those_of_one_process(family, processes):
    if family == "llama" and processes > 2:
        processes = 2  # it has two heads of keys
    (whole,) = drawn(family, 1)
    expected = whole.layout().parameters()
    for model in drawn(family, processes):
        found = model.layout().parameters()
        assert found.keys() == expected.keys()
        for name, one in found.items():
            assert one.equal(one.cut.part_of(expected[name])), name


@EACH
def test_what_they_write_together_is_what_one_process_writes(family, tmp_path):
    (model,), (optimizer,) = state = trained(family, 1)
    expected = write(tmp_path / "whole", *state)
    assert write(tmp_path / "shared", *shared(model, optimizer, 2)) == expected


@EACH
def test_what_they_write_is_read_by_them_and_by_one_process(family, tmp_path):
    written = write(tmp_path / "shared", *(state := trained(family, 2)))
    for processes in (1, 2):
        some = models(family, processes)
        optimizers = [optimizer_of(model) for model in some]
        for model, optimizer in zip(some, optimizers, strict=True):
            restore_weights(tmp_path / "shared", model)
            restore_moments(tmp_path / "shared", model.layout(), optimizer, "adamw")
        assert write(tmp_path / f"again by {processes}", some, optimizers) == written
    for first, before, second, after in zip(*state, some, optimizers, strict=True):
        for one, other in zip(first.parameters(), second.parameters(), strict=True):
            assert one.equal(other)
            assert before.state[one].keys() == after.state[other].keys()
            for key, value in before.state[one].items():
                assert value.dtype == after.state[other][key].dtype
                assert value.equal(after.state[other][key]), key


def test_a_file_with_a_copy_of_the_tied_embedding_is_read(tmp_path):
    (model,) = drawn("gpt2", 1)
    tensors = {
        name: (one.t() if model.layout().is_transposed(name) else one).detach().contiguous()
        for name, one in model.layout().parameters().items()
    }
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for part in models("gpt2", 2):
        restore_weights(tmp_path, part)
        assert part.lm_head.weight is part.get_input_embeddings().weight
        for whole, one in zip(model.parameters(), part.parameters(), strict=True):
            assert one.equal(one.cut.part_of(whole))


@EACH
def test_counts_are_those_of_the_whole_model(family):
    (whole,), (part, _) = models(family, 1), models(family, 2)
    own, every = (one.get_output_embeddings().weight for one in (part, whole))
    assert own.numel() < every.numel()
    assert parameter_count(part) == parameter_count(whole)
    assert part.flops_per_token(64) == whole.flops_per_token(64)
    one, other = part.layout(), whole.layout()
    assert one.size_without_output() == other.size_without_output()
    assert snapshot_bytes(one, "adamw") == snapshot_bytes(other, "adamw")
    assert moment_counts(one, "adamw") == moment_counts(other, "adamw")
    assert [numbers_in(a) for a in part.parameters()] == [a.numel() for a in whole.parameters()]
    one.refuse_undescribed()
