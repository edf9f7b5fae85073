"""Where the time of all attempts went. Slow: real runs."""

from __future__ import annotations

import time

import pytest

import runs
from store.events import read_events
from store.goodput import LOST, USEFUL, goodput_of

pytestmark = pytest.mark.slow


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
