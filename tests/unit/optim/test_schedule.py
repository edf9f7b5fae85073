"""The schedule of warm-up, stable rate and decay, and runs that are extended under it."""

from __future__ import annotations

import shutil

import pytest

import runs
from config.schema import OptimConfig
from training.step import learning_rate_at

WSD = OptimConfig(
    learning_rate=1.0,
    min_learning_rate=0.1,
    warmup_steps=10,
    schedule="wsd",
    decay_fraction=0.2,
)


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (1, 0.1),
        (10, 1.0),
        (11, 1.0),
        (80, 1.0),
        (81, 0.798754),  # 0.1 + 0.9 (1 - sqrt(1 / 20))
        (85, 0.55),
        (99, 0.122788),
        (100, 0.1),
        (200, 0.1),
    ],
)
def test_the_rate_is_stable_then_falls_as_one_minus_the_root(step, rate):
    assert learning_rate_at(step, WSD, max_steps=100) == pytest.approx(rate, abs=1e-6)


@pytest.mark.thorough
def test_an_extended_run_is_one_that_was_longer_from_the_start(small, tmp_path):
    wsd = [*small, "optim.schedule=wsd", "snapshot.every=5", "train.eval_every=20"]
    wsd.append("optim.min_learning_rate=0")
    long, extended = tmp_path / "long", tmp_path / "extended"
    result = runs.train(*wsd, "train.max_steps=20", f"run.dir={long}")
    assert result.returncode == 0, result.stderr
    assert "Continue training: the same command with train.max_steps=40\n" in result.stdout
    # Of 10 steps the last 2 decay: the snapshot of step 5 is of the stable phase.
    assert runs.train(*wsd, "train.max_steps=10", f"run.dir={extended}").returncode == 0
    shutil.rmtree(runs.snapshot(extended, 10))
    result = runs.train(*wsd, "train.max_steps=20", f"run.dir={extended}")
    assert result.returncode == 0, result.stderr
    runs.assert_same_bits(runs.snapshot(long, 20), runs.snapshot(extended, 20))
    rates = [record["learning_rate"] for record in runs.metrics(extended)]
    assert rates == [record["learning_rate"] for record in runs.metrics(long)]
