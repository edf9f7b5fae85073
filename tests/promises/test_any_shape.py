"""Promise 1: one run, any shape. Other models, and documents: test_models_in_shapes.py."""

from __future__ import annotations

from pathlib import Path

import pytest

import runs
from runs import CONSTANT, relative_difference


@pytest.fixture(scope="module")
def single(small, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("single") / "run"
    result = runs.train(*small, *CONSTANT, f"run.dir={run_dir}", code=0)
    assert "1 process," in result.stdout
    return run_dir


def assert_same_numbers(one: Path, other: Path) -> None:
    """Losses, gradient norms, and the held-out text, of which every character counts once."""
    difference = relative_difference(runs.losses(one), runs.losses(other))
    print(f"largest relative difference: {difference:.1e}")
    assert difference < 1e-5
    norms = [[record["grad_norm"] for record in runs.metrics(run)] for run in (one, other)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    held_out = [runs.metrics(run, "eval") for run in (one, other)]
    assert [record["step"] for record in held_out[1]] == [15, 30]
    losses = [[record["loss"] for record in records] for records in held_out]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_accumulation_does_not_change_the_losses(single, small, tmp_path):
    words = ["train.micro_batch_size=2", f"run.dir={tmp_path / 'run'}"]
    result = runs.train(*small, *CONSTANT, *words, code=0)
    assert "4 accumulated" in result.stdout
    assert_same_numbers(single, tmp_path / "run")


SHARD_2, SHARD_3 = ({"parallelism_config_dp_shard_size": size} for size in (2, 3))
QUICK, THOROUGH, SLOW = [], [pytest.mark.thorough], [pytest.mark.slow]
"""The others show the same, a piece each."""
ANSWERS = {
    "fsdp_transformer_layer_cls_to_wrap": None,  # "use the model's _no_split_modules"
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_reshard_after_forward": False,
    "fsdp_state_dict_type": "FULL_STATE_DICT",
}
"""What `accelerate config` writes, by a user's own answers."""
ONCE = "run.sync_each_micro_batch=false"
SENT_ONCE = "whole weights and gradients over a step's micro-batches"
FLOAT32 = "processes, CPU with 1 thread each, float32, FSDP"
# The shipped config file, processes, its other entries, sequences at once, what the header says.
SHAPES = [
    ("ddp_cpu", 2, {}, 2, "2 sequences x 2 processes x 2 accumulated", QUICK),
    ("fsdp_cpu", 2, {}, 4, f"2 {FLOAT32}\n", THOROUGH),
    ("fsdp", 4, {}, 2, f"4 {FLOAT32}\n"),
    ("fsdp_multinode", 2, {}, 2, "2 sequences x 2 processes x 2 accumulated"),
    ("fsdp_offload", 2, {}, 4, "FSDP, weights and optimizer on the CPU", THOROUGH),
    ("fsdp_hybrid", 4, SHARD_2, 2, f"4 {FLOAT32} (2 replicas of 2 shards)", THOROUGH),
    ("cp_cpu", 4, SHARD_2, 2, "2 sequences x 2 groups of 2 processes x 2 accumulated", THOROUGH),
    # Shares of 8 sequences that differ by one, filled up with padding; also fewer than processes.
    ("ddp_cpu", 3, {}, 4, "3 sequences x 3 processes x 1 accumulated, 1 of them padding;"),
    ("ddp_cpu", 9, {}, 1, "1 sequence x 9 processes x 1 accumulated, 1 of them padding;"),
    ("fsdp_cpu", 3, {}, 2, "1 sequence x 3 processes x 3 accumulated, 1 of them padding;"),
    ("fsdp_cpu", 5, {}, 1, "1 sequence x 5 processes x 2 accumulated, 2 of them padding;"),
    ("fsdp_hybrid", 6, SHARD_3, 1, "1 sequence x 6 processes x 2 accumulated, 4 of them padding;"),
    ("cp_cpu", 6, SHARD_3, 3, "3 groups of 2 processes x 1 accumulated, 1 of them padding;"),
    ("fsdp_tp_cpu", 6, SHARD_3, 3, "3 groups of 2 processes x 1 accumulated, 1 of them padding;"),
    ("fsdp_cpu", 2, ANSWERS, 4, "FSDP, gathered until the backward pass", THOROUGH),
    # Several micro-batches whose gradients are sent once.
    ("fsdp_cpu", 2, {}, 1, SENT_ONCE, THOROUGH),
    ("fsdp_hybrid_cpu", 4, {}, 1, SENT_ONCE),
]


@pytest.mark.parametrize(
    ("config", "processes", "changes", "micro_batch_size", "header"),
    [
        pytest.param(*shape[:5], marks=[*shape[5:], SLOW][0], id=f"{shape[0]}-{number}")
        for number, shape in enumerate(SHAPES)
    ],
)
def test_several_processes_have_the_losses_of_one(
    single, small, tmp_path, config, processes, changes, micro_batch_size, header
):
    words = [f"run.dir={tmp_path / 'run'}", f"train.micro_batch_size={micro_batch_size}"]
    words += [ONCE] * (header == SENT_ONCE)
    file = runs.rehearsal(f"{config}.yaml", tmp_path, processes, **changes)
    result = runs.launch(file, *small, *CONSTANT, *words, code=0)
    assert header in result.stdout
    assert f"{processes} processes," in result.stdout
    assert_same_numbers(single, tmp_path / "run")
