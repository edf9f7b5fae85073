"""Promise 1: one run, any shape. Other models, and documents: test_models_in_shapes.py."""

from __future__ import annotations

import re

import pytest

import families
import runs
from runs import CONSTANT, relative_difference

STEPS = 30


@pytest.fixture(scope="module")
def single(small, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("single") / "run"
    result = runs.train(*small, *CONSTANT, f"run.dir={run_dir}")
    assert result.returncode == 0, result.stderr
    assert "1 process," in result.stdout
    return run_dir


def test_accumulation_does_not_change_the_losses(single, small, tmp_path):
    result = runs.train(
        *small, *CONSTANT, f"run.dir={tmp_path / 'run'}", "train.micro_batch_size=2"
    )
    assert result.returncode == 0, result.stderr
    assert "4 accumulated" in result.stdout
    difference = relative_difference(runs.losses(single), runs.losses(tmp_path / "run"))
    print(f"largest relative difference, accumulation: {difference:.1e}")
    assert difference < 1e-5


# The shipped config file, processes, its other entries, sequences at once, what the header says.
SHAPES = [
    ("ddp_cpu.yaml", 2, {}, 2, "2 sequences x 2 processes x 2 accumulated"),
    ("fsdp_cpu.yaml", 2, {}, 4, "2 processes, CPU with 1 thread each, float32, FSDP\n"),
    ("fsdp.yaml", 4, {}, 2, "4 processes, CPU with 1 thread each, float32, FSDP\n"),
    ("fsdp_multinode.yaml", 2, {}, 2, "2 sequences x 2 processes x 2 accumulated"),
    ("fsdp_offload.yaml", 2, {}, 4, "FSDP, weights and optimizer on the CPU"),
    (
        "fsdp_hybrid.yaml",
        4,
        {"parallelism_config_dp_shard_size": 2},
        2,
        "4 processes, CPU with 1 thread each, float32, FSDP (2 replicas of 2 shards)",
    ),
    (
        "cp_cpu.yaml",
        4,
        {"parallelism_config_dp_shard_size": 2},
        2,
        "2 sequences x 2 groups of 2 processes x 2 accumulated",
    ),
    # Shares of 8 sequences that differ by one, filled up with padding; also fewer than processes.
    ("ddp_cpu.yaml", 3, {}, 4, "3 sequences x 3 processes x 1 accumulated, 1 of them padding;"),
    ("ddp_cpu.yaml", 9, {}, 1, "1 sequence x 9 processes x 1 accumulated, 1 of them padding;"),
    ("fsdp_cpu.yaml", 3, {}, 2, "1 sequence x 3 processes x 3 accumulated, 1 of them padding;"),
    ("fsdp_cpu.yaml", 5, {}, 1, "1 sequence x 5 processes x 2 accumulated, 2 of them padding;"),
    (
        "fsdp_hybrid.yaml",
        6,
        {"parallelism_config_dp_shard_size": 3},
        1,
        "1 sequence x 6 processes x 2 accumulated, 4 of them padding;",
    ),
    (
        "cp_cpu.yaml",
        6,
        {"parallelism_config_dp_shard_size": 3},
        3,
        "3 sequences x 3 groups of 2 processes x 1 accumulated, 1 of them padding;",
    ),
    (
        "fsdp_tp_cpu.yaml",
        6,
        {"parallelism_config_dp_shard_size": 3},
        3,
        "3 sequences x 3 groups of 2 processes x 1 accumulated, 1 of them padding;",
    ),
    # What `accelerate config` writes for the same, by a user's own answers.
    (
        "fsdp_cpu.yaml",
        2,
        {
            "fsdp_transformer_layer_cls_to_wrap": None,  # "use the model's _no_split_modules"
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_reshard_after_forward": False,
            "fsdp_state_dict_type": "FULL_STATE_DICT",
        },
        4,
        "FSDP, gathered until the backward pass",
    ),
]


# The others show the same, a piece each.
SLOW = ["fsdp.yaml-2-0", "fsdp_multinode.yaml-2-0"]
SLOW += ["ddp_cpu.yaml-4-0", "ddp_cpu.yaml-1-0", "fsdp_cpu.yaml-2-0", "fsdp_cpu.yaml-1-0"]
SLOW += ["fsdp_hybrid.yaml-1-1", "cp_cpu.yaml-3-1", "fsdp_tp_cpu.yaml-3-1"]
THOROUGH = ["fsdp_hybrid.yaml-2-1", "fsdp_offload.yaml-4-0"]
THOROUGH += ["fsdp_cpu.yaml-4-4", "fsdp_cpu.yaml-4-0", "cp_cpu.yaml-2-1"]
NAMES = [f"{config}-{micro}-{len(changes)}" for config, _, changes, micro, _ in SHAPES]


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] * (name in SLOW) + [pytest.mark.thorough] * (name in THOROUGH)


@pytest.mark.parametrize(
    ("config", "processes", "changes", "micro_batch_size", "header"),
    [
        pytest.param(*shape, marks=marks(name), id=name)
        for shape, name in zip(SHAPES, NAMES, strict=True)
    ],
)
def test_several_processes_have_the_losses_of_one(
    single, small, tmp_path, config, processes, changes, micro_batch_size, header
):
    result = runs.launch(
        runs.rehearsal(config, tmp_path, processes, **changes),
        *small,
        *CONSTANT,
        f"run.dir={tmp_path / 'run'}",
        f"train.micro_batch_size={micro_batch_size}",
    )
    assert result.returncode == 0, result.stderr
    assert header in result.stdout
    assert f"{processes} processes," in result.stdout
    difference = relative_difference(runs.losses(single), runs.losses(tmp_path / "run"))
    print(f"largest relative difference, {config}, {processes} processes: {difference:.1e}")
    assert difference < 1e-5
    norms = [[r["grad_norm"] for r in runs.metrics(d)] for d in (single, tmp_path / "run")]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    # Held-out text that the processes cannot share equally counts every character once.
    held_out = [runs.metrics(run_dir, "eval") for run_dir in (single, tmp_path / "run")]
    for one, other in zip(*held_out, strict=True):
        assert other["step"] == one["step"]
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)


@pytest.mark.slow
def test_a_mixture_is_balanced_alike_recomputed_and_compiled(small, tmp_path):
    """In other shapes: test_models_in_shapes.py."""
    base = families.make("mixtral", tmp_path / "base", **families.BALANCED)
    words = [word for word in small if not word.startswith("model.n_")]
    words += [*CONSTANT, f"model.pretrained={base}", "train.max_steps=10"]
    words += ["data.documents=masked"]
    one = tmp_path / "one"
    result = runs.train(*words, f"run.dir={one}")
    assert result.returncode == 0, result.stderr
    assert ", load_balancing_loss " in result.stdout
    last, held_out = runs.metrics(one)[-1], runs.metrics(one, "eval")[-1]
    assert held_out["loss"] < last["loss"] - 0.9 * 0.5 * last["load_balancing_loss"]
    compiled = {"dynamo_backend": "AOT_EAGER", "dynamo_use_regional_compilation": True}
    for config, processes, changes, more in (
        ("fsdp_cpu.yaml", 2, compiled, ["model.activation_checkpointing=true"]),
        ("cp_cpu.yaml", 2, {}, ["model.activation_checkpointing=selective"]),
        ("ddp_cpu.yaml", 3, {}, ["train.micro_batch_size=1"]),  # with padding
    ):
        several = tmp_path / config
        file = runs.rehearsal(config, tmp_path, processes, **changes)
        result = runs.launch(file, *words, *more, f"run.dir={several}")
        assert result.returncode == 0, result.stderr
        assert f"{processes} processes," in result.stdout
        assert ("compiled by block" in result.stdout) == bool(changes)
        for name in ("loss", "grad_norm", "load_balancing_loss"):
            found = [[r[name] for r in runs.metrics(d)] for d in (one, several)]
            assert found[1] == pytest.approx(found[0], rel=1e-5), (config, name)


@pytest.mark.parametrize(
    ("config", "processes"),
    [
        pytest.param("fsdp_cpu.yaml", 2, marks=pytest.mark.thorough),
        pytest.param("fsdp_hybrid_cpu.yaml", 4, marks=pytest.mark.slow),
    ],
)
def test_a_step_that_sends_once_has_the_losses_of_one(single, small, tmp_path, config, processes):
    words = [*small, *CONSTANT, "run.sync_each_micro_batch=false", f"run.dir={tmp_path / 'run'}"]
    result = runs.launch(
        runs.rehearsal(config, tmp_path, processes), *words, "train.micro_batch_size=1"
    )
    assert result.returncode == 0, result.stderr
    assert "whole weights and gradients over a step's micro-batches" in result.stdout
    assert relative_difference(runs.losses(single), runs.losses(tmp_path / "run")) < 1e-5
    norms = [[r["grad_norm"] for r in runs.metrics(d)] for d in (single, tmp_path / "run")]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    held_out = [[r["loss"] for r in runs.metrics(d, "eval")] for d in (single, tmp_path / "run")]
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-5)


@pytest.mark.slow
def test_gradients_reduced_in_bf16_have_the_losses_in_3_digits(single, small, tmp_path):
    for config in ("ddp_cpu.yaml", "fsdp_cpu.yaml"):
        run_dir = tmp_path / config
        words = [*small, *CONSTANT, "run.reduce_dtype=bf16", f"run.dir={run_dir}"]
        result = runs.launch(runs.rehearsal(config, tmp_path, 2), *words)
        assert result.returncode == 0, result.stderr
        assert "gradients reduced in bf16" in result.stdout
        assert 0 < relative_difference(runs.losses(single), runs.losses(run_dir)) < 1e-3


# Wider than its vocabulary a model takes the loss of all logits at once, else in pieces.
NARROW = ("model.n_embd=16", "train.micro_batch_size=2")


@pytest.fixture(scope="module")
def narrow(small, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("narrow") / "run"
    result = runs.train(*small, *CONSTANT, *NARROW, f"run.dir={run_dir}")
    assert result.returncode == 0, result.stderr
    vocabulary = int(re.search(r"characters, (\d+) different", result.stdout)[1])
    assert vocabulary > 16
    return run_dir


@pytest.mark.thorough
@pytest.mark.parametrize("config", ["ddp_cpu.yaml", "fsdp_cpu.yaml"])
def test_a_vocabulary_wider_than_the_model_has_the_same_losses(narrow, small, tmp_path, config):
    run_dir = tmp_path / "run"
    words = [*small, *CONSTANT, *NARROW, f"run.dir={run_dir}"]

    result = runs.launch(runs.rehearsal(config, tmp_path, 2), *words)

    assert result.returncode == 0, result.stderr
    assert "2 sequences x 2 processes x 2 accumulated" in result.stdout
    assert relative_difference(runs.losses(narrow), runs.losses(run_dir)) < 1e-5
    norms = [[r["grad_norm"] for r in runs.metrics(d)] for d in (narrow, run_dir)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    held_out = [[r["loss"] for r in runs.metrics(d, "eval")] for d in (narrow, run_dir)]
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-5)
