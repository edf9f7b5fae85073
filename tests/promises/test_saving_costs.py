"""When a run saves changes nothing that it learns; a run that may cost no more stops in order.

Slow: each test starts real runs, and the clock decides when they save.
"""

from __future__ import annotations

import random

import pytest

import runs
from kills import after_a_rename, kill_at

pytestmark = pytest.mark.slow
STEPS = 150


def saved_steps(run_dir) -> list[int]:
    return sorted(int(path.name[5:]) for path in run_dir.glob("snapshots/step-????????"))


@pytest.mark.parametrize(
    "saving",
    [
        ["snapshot.every=auto", "run.interruptions_per_day=80000"],
        ["snapshot.every_minutes=0.03"],
    ],
)
def test_an_interval_of_the_clock_changes_no_bit(small, tmp_path, saving):
    """Two processes save at the same steps, are killed, and end with the bits of a fixed one."""
    overrides = [
        *(word for word in small if not word.startswith("snapshot.every=")),
        *("model.dropout=0.1", f"train.max_steps={STEPS}", "snapshot.keep=1000"),
        *("train.eval_every=75", "train.sample_every=0", "train.log_every=5"),
    ]
    fixed, chosen = tmp_path / "fixed", tmp_path / "chosen"
    whole = runs.launch("ddp_cpu.yaml", *overrides, "snapshot.every=1000", f"run.dir={fixed}")
    assert whole.returncode == 0, whole.stderr
    words = runs.launch_command("ddp_cpu.yaml", *overrides, *saving, f"run.dir={chosen}")
    moment = after_a_rename(chosen, random.Random(1))
    assert kill_at(words, moment, tmp_path / "said", forked=False)
    rest = runs.run(words)
    assert rest.returncode == 0, rest.stderr
    assert "2 processes" in rest.stdout
    assert len(saved_steps(chosen)) > len(saved_steps(fixed)) == 1
    runs.assert_same_bits(runs.snapshot(fixed, STEPS), runs.snapshot(chosen, STEPS))
    assert runs.losses(chosen) == runs.losses(fixed)
    if "snapshot.every=auto" in saving:
        assert "80000 interruptions a day" in rest.stdout.replace("8e+04", "80000")


def test_a_run_stops_when_its_money_is_spent(small, tmp_path):
    """On all attempts together; then it is refused, and a larger sum resumes it."""
    run_dir = tmp_path / "run"
    # A second costs 1, so that the first attempt has spent at least 100 when it is seen to train.
    words = [*small, f"run.dir={run_dir}", "train.max_steps=1000000", "run.price_per_hour=3600"]
    words += ["train.log_every=1"]
    result = runs.train(*words, "run.max_cost=100")
    assert result.returncode == 2, result.stderr
    assert "stopped   by run.max_cost=100 at step" in result.stdout
    assert "the same command with a larger run.max_cost resumes there" in result.stdout
    stopped_at = runs.newest_step(run_dir)
    assert saved_steps(run_dir)[-1] == stopped_at
    refused = runs.train(*words, "run.max_cost=100")
    assert refused.returncode == 2
    assert "run.max_cost=100 is spent: this run has cost" in refused.stderr
    assert "A larger run.max_cost, such as 200, resumes it." in refused.stderr
    assert runs.newest_step(run_dir) == stopped_at
    resumed = runs.train(*words, "run.max_cost=200", "run.max_minutes=1")
    assert f"step-{stopped_at:08d}, the newest of this run" in resumed.stdout
    assert "of run.max_cost=200 spent" in resumed.stdout
