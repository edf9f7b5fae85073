"""The schedule of warm-up, stable rate and decay, and runs that are extended under it."""

from __future__ import annotations

import shutil

import pytest

import runs
from config.compose import load_config
from config.schema import OptimConfig
from small_snapshots import state_at
from training.reporting.header import rate_jump
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
    assert "rises" not in result.stdout
    runs.assert_same_bits(runs.snapshot(long, 20), runs.snapshot(extended, 20))
    rates = [record["learning_rate"] for record in runs.metrics(extended)]
    assert rates == [record["learning_rate"] for record in runs.metrics(long)]


def jump(*words: str, steps: int = 2000) -> str | None:
    """The hint of a run of 2,000 steps that is extended to 4,000 after so many steps."""
    before = load_config(["train.max_steps=2000", *words])
    state = state_at(steps)
    state.config = {"optim": vars(before.optim), "train": vars(before.train)}
    return rate_jump(state, load_config(["train.max_steps=4000", *words]))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optim.schedule=wsd"], "rises from 0.0003 to 0.01, as"),
        (["optim.schedule=wsd", "optim.min_learning_rate=0"], "rises from 0 to"),
        (["optim.schedule=cosine", "optim.min_learning_rate=0"], "rises from 0 to"),
    ],
)
def test_a_finished_run_jumps_back_to_the_stable_rate(words, said):
    words = jump(*words)
    assert words is not None
    assert said in words


def test_the_rate_of_the_stable_phase_does_not_jump():
    assert jump("optim.schedule=wsd", steps=1600) is None


@pytest.mark.parametrize(
    ("words", "batches"),
    [
        ([], 75),  # of 250 steps, whose work is that of 750 evaluated batches
        (["train.eval_every=100"], 30),
        (["train.max_steps=8"], 5),
        (["train.eval_every=100000", "train.max_steps=100000"], 200),
        (["train.eval_batches=12"], 12),
        (["train.eval_batches=null"], None),
        (["experiment=finetune_gpt2", "data.source=my.txt"], 10),
    ],
)
def test_an_evaluation_takes_a_tenth_of_the_steps_work(words, batches):
    """Counted in batches and not in seconds: the held-out loss is the same on every machine."""
    assert load_config(words).train.eval_batches == batches
