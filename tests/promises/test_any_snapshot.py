"""Promises 1 and 2 across topologies: a snapshot written by any, read by any."""

from __future__ import annotations

import shutil
from functools import cache
from itertools import product

import pytest

import runs
import shapes
from shapes import Shape

STEPS = 20
WORDS = (
    "train.global_batch_size=12",  # which one, two and three processes can share
    f"train.max_steps={STEPS}",
    "train.eval_every=100",
    "optim.learning_rate=1e-3",
    "optim.min_learning_rate=1e-3",
    "snapshot.piece_bytes=1000000",
)
SHAPES = {**shapes.SHAPES, "FSDP 3": Shape("fsdp_cpu.yaml", 3, 3, ", FSDP")}
PADDED = {
    "DDP 5": Shape("ddp_cpu.yaml", 5, 5, ", DDP"),
    "FSDP 5": Shape("fsdp_cpu.yaml", 5, 5, ", FSDP"),
}
"""Processes that cannot share 12 sequences equally."""


@pytest.fixture(scope="module")
def run_in(small, tmp_path_factory):
    """Run in a shape, in a directory."""
    folder = tmp_path_factory.mktemp("configs")

    def run(shape, run_dir):
        chosen = {**SHAPES, **PADDED}[shape]
        path = chosen.file(folder)
        result = runs.launch(path, *small, "model.n_head=4", *WORDS, f"run.dir={run_dir}", code=0)
        assert chosen.is_named_in(result.stdout)
        assert ("3 of them padding" in result.stdout) == (shape in PADDED)
        return result

    return run


@pytest.fixture(scope="module")
def uninterrupted(run_in, tmp_path_factory):
    """A run of 20 steps in a shape, with snapshots at 10 and 20, made when asked for."""
    root = tmp_path_factory.mktemp("uninterrupted")

    @cache
    def uninterrupted(shape):
        run_in(shape, root / shape)
        return root / shape

    return uninterrupted


THOROUGH = {
    ("1", "FSDP 2"),
    ("FSDP 2", "1"),
    ("FSDP 3", "DDP 2"),
    ("cp 2", "1"),
    ("FSDP 2", "tp 2"),
    ("tp 2 x shard 2", "1"),
    ("tp 2 x shard 2", "tp 2 x shard 2"),
}
"""With those, each kind of shape writes for another; the rest are slow tests."""


PAIRS = [*product(SHAPES, SHAPES), ("DDP 5", "1"), ("1", "FSDP 5"), ("FSDP 5", "DDP 5")]
PAIRS += [("DDP 5", "DDP 5")]
PARAMS = [
    pytest.param(*pair, marks=pytest.mark.thorough if pair in THOROUGH else pytest.mark.slow)
    for pair in PAIRS
]


@pytest.mark.parametrize(("writer", "reader"), PARAMS)
def test_a_snapshot_of_any_shape_goes_on_in_any_other(
    uninterrupted, run_in, tmp_path, writer, reader
):
    run_dir = tmp_path / "run"
    shutil.copytree(runs.snapshot(uninterrupted(writer), 10), runs.snapshot(run_dir, 10))
    shutil.copy(uninterrupted(writer) / "metrics.jsonl", run_dir / "metrics.jsonl")
    result = run_in(reader, run_dir)
    assert "step-00000010, the newest of this run" in result.stdout
    assert ("but the last bits of sums may differ" in result.stdout) == (writer != reader)
    expected, found = runs.losses(uninterrupted("1"))[10:], runs.losses(run_dir)[10:]
    difference = max(abs(a - b) / a for a, b in zip(expected, found, strict=True))
    print(f"{writer} to {reader}: largest relative difference {difference:.1e}")
    assert difference < 1e-5
    if writer == reader:
        last = [runs.snapshot(place, STEPS) for place in (uninterrupted(writer), run_dir)]
        runs.assert_same_bits(*last)
