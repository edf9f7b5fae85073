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


def test_a_decay_over_everything_begins_after_the_warm_up():
    whole = OptimConfig(1.0, 0.0, warmup_steps=10, schedule="wsd", decay_fraction=1.0)
    rates = [learning_rate_at(step, whole, max_steps=14) for step in range(9, 15)]
    assert rates == pytest.approx([0.9, 1.0, 0.5, 0.292893, 0.133975, 0.0], abs=1e-6)
    assert learning_rate_at(5, whole, max_steps=5) == 0.5  # it ends in the warm-up


def test_a_stable_rate_does_not_depend_on_the_last_step():
    for step in range(1, 81):
        rates = {learning_rate_at(step, WSD, most) for most in (100, 101, 500, 10**9)}
        assert len(rates) == 1


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
