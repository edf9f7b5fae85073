"""Promise 2 for state in fewer bytes: the same bits after a restart, the same numbers elsewhere."""

from __future__ import annotations

import shutil

import pytest

import runs
from runs import CONSTANT, relative_difference

STEPS = 20
WIDE = ("model.n_embd=64", "model.n_head=2", f"train.max_steps={STEPS}", "train.eval_every=100")
SHAPES = {"one": ("cpu.yaml", 1), "FSDP-2": ("fsdp_cpu.yaml", 2), "DDP-2": ("ddp_cpu.yaml", 2)}
SHAPES |= {"TP-2": ("tp_cpu.yaml", 2), "TP-2 FSDP-2": ("fsdp_tp_cpu.yaml", 4)}


@pytest.fixture(scope="module")
def run_in(small, tmp_path_factory):
    """Run in a shape with a dtype, in a directory."""
    folder = tmp_path_factory.mktemp("configs")

    def run(shape, dtype, run_dir, *words):
        config, processes = SHAPES[shape]
        words = [*small, *CONSTANT, *WIDE, f"optim.state_dtype={dtype}", *words]
        file = runs.rehearsal(config, folder, processes)
        result = runs.launch(file, *words, f"run.dir={run_dir}")
        assert result.returncode == 0, result.stderr
        assert f"{processes} process" in result.stdout
        return result

    return run


def resumed_from(run_dir, folder):
    """A copy of a run's directory as a kill after step 10 leaves it."""
    shutil.copytree(runs.snapshot(run_dir, 10), runs.snapshot(folder, 10))
    shutil.copy(run_dir / "metrics.jsonl", folder / "metrics.jsonl")
    return folder


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param("one", "8bit"),
        pytest.param("one", "bf16", marks=pytest.mark.slow),
        pytest.param("DDP-2", "8bit", marks=pytest.mark.slow),
        pytest.param("FSDP-2", "8bit", marks=pytest.mark.slow),
        pytest.param("FSDP-2", "bf16", marks=pytest.mark.slow),
        pytest.param("TP-2", "8bit", marks=pytest.mark.slow),
        pytest.param("TP-2", "bf16", marks=pytest.mark.slow),
        pytest.param("TP-2 FSDP-2", "8bit", marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_with_the_same_bits(run_in, tmp_path, shape, dtype):
    whole = tmp_path / "whole"
    run_in(shape, dtype, whole, "model.dropout=0.1")
    run_dir = resumed_from(whole, tmp_path / "resumed")
    run_in(shape, dtype, run_dir, "model.dropout=0.1")
    runs.assert_same_bits(runs.snapshot(whole, STEPS), runs.snapshot(run_dir, STEPS))


@pytest.mark.thorough
def test_another_dtype_goes_on_from_the_same_snapshot(run_in, tmp_path):
    """In any shape: blocks lie within the row of a shard, or of what a process has of it."""
    whole = tmp_path / "whole"
    run_in("one", "float32", whole)
    expected = runs.losses(whole)
    for shape in ("one", "FSDP-2", "TP-2"):
        run_dir = resumed_from(whole, tmp_path / shape)
        result = run_in(shape, "8bit", run_dir)
        assert "optim.state_dtype" in result.stdout  # what has changed since
        assert relative_difference(expected[10:], runs.losses(run_dir)[10:]) < 1e-3
