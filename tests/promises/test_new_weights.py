"""Promise 1: new weights have the same bits in any shape of a run."""

from __future__ import annotations

import json

import pytest

import runs

SIZES = ("model.n_layer=1", "model.n_embd=288")
"""Sizes that three shards do not divide."""


def first_weights(result) -> dict[str, str]:
    """The hash of each parameter, gathered, before the first step."""
    assert result.returncode == 0, result.stderr
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("weights: "))
    return json.loads(line.removeprefix("weights: "))


@pytest.fixture(scope="module")
def alone(small, tmp_path_factory):
    words = ("weights", *small, *SIZES, f"run.dir={tmp_path_factory.mktemp('alone') / 'run'}")
    return first_weights(runs.run(runs.command(*words, script=str(runs.ALTERED))))


@pytest.mark.parametrize(
    ("config", "processes", "changes"),
    [
        pytest.param("fsdp_cpu.yaml", 2, {}, marks=pytest.mark.thorough, id="FSDP 2"),
        pytest.param("fsdp.yaml", 4, {}, marks=pytest.mark.slow, id="FSDP 4"),
        pytest.param("ddp_cpu.yaml", 2, {}, marks=pytest.mark.slow, id="DDP 2"),
        pytest.param("tp_cpu.yaml", 2, {}, marks=pytest.mark.slow, id="TP 2"),
        pytest.param("fsdp_tp_cpu.yaml", 4, {}, marks=pytest.mark.thorough, id="TP 2 FSDP 2"),
        pytest.param(
            "fsdp_hybrid.yaml",
            4,
            {"parallelism_config_dp_shard_size": 2},
            marks=pytest.mark.slow,
            id="hybrid 2 x 2",
        ),
    ],
)
def test_new_weights_are_those_of_one_process(alone, small, tmp_path, config, processes, changes):
    config = runs.rehearsal(config, tmp_path, processes, **changes)
    words = ("weights", *small, *SIZES, f"run.dir={tmp_path / 'run'}")
    result = runs.run(runs.launch_command(config, *words, script=runs.ALTERED))
    assert f"{processes} processes," in result.stdout
    assert first_weights(result) == alone
