"""When a run saves changes nothing that it learns; what it costs is counted over all attempts.

Slow: each test starts real runs, and the clock decides when they save.
"""

from __future__ import annotations

import random
import time

import pytest

import runs
from kills import after_a_rename, kill_at
from store.events import read_events
from store.goodput import LOST, USEFUL, goodput_of

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


def test_the_goodput_of_a_run_that_is_killed_twice_is_what_was_counted(small, tmp_path):
    run_dir, store = tmp_path / "run", f"file://{tmp_path / 'store'}"
    words = runs.command(
        *(word for word in small if not word.startswith("snapshot.every=")),
        *(f"run.dir={run_dir}", f"hub.url={store}", "hub.min_interval_seconds=0"),
        *("train.max_steps=300", "train.log_every=10", "train.eval_every=1000"),
        *("snapshot.every=40", "train.sample_every=0"),
    )
    assert runs.run([*words, "--show"]).returncode == 0  # starts the process that others fork from
    held, reached = 0.0, []
    for until in (70, 150):
        begun = time.time()
        with runs.started(words, into=tmp_path / f"said-{until}") as process:
            runs.wait_until(lambda until=until: runs.newest_step(run_dir) >= until, process)
            runs.kill_all(process)
        held += (run_dir / "metrics.jsonl").stat().st_mtime - begun
        reached.append(runs.newest_step(run_dir))
    begun = time.time()
    last = runs.run(words)
    held += time.time() - begun
    assert last.returncode == 0, last.stderr
    events = read_events(run_dir / "events.jsonl")
    resumed = [one["step"] for one in events if one["event"] == "start"][1:]
    found = goodput_of(events)
    print(last.stdout[-1500:])
    print(f"counted here: {held:.1f} s held, steps {reached}, resumed {resumed}")
    assert (found.attempts, found.interruptions) == (3, 2)
    assert found.steps_lost == sum(a - b for a, b in zip(reached, resumed, strict=True))
    assert found.total == pytest.approx(held, rel=0.15)
    # Of each step in the model, its line has the speed; its seconds include the wait for data.
    tokens = 16 * int(next(w for w in words if "global_batch_size" in w).split("=")[1])
    useful = sum(tokens / record["tokens_per_second"] for record in runs.metrics(run_dir))
    assert found.share == pytest.approx(useful / held, rel=0.2)
    both = found.seconds[USEFUL] + found.seconds[LOST]
    share_of_steps = 300 / (300 + found.steps_lost)
    assert found.seconds[USEFUL] / both == pytest.approx(share_of_steps, rel=0.1)
    assert " in 3 attempts; 2 interruptions" in last.stdout
    for place in (str(run_dir), store):
        status = runs.run([*runs.MODULE, "status", place])
        assert status.returncode == 0, status.stderr
        assert " in 3 attempts; 2 interruptions" in status.stdout
        assert "steps lost and redone" in status.stdout
