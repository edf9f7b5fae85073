"""Promise 2, the hard way: killed at any moment, a run ends with the bits of one that was not."""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path

import pytest

import runs

STEPS = 400
KILLS = 10


def wait_for(moment, process: subprocess.Popen) -> bool:
    """Wait until `moment()` holds, closely enough to hit the inside of a snapshot's writing."""
    end = time.monotonic() + runs.DEADLINE_SECONDS
    while time.monotonic() < end:
        if moment():
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.0005)
    raise AssertionError("the run did nothing before the deadline")


def kill_at(words: list[str], moment, said: Path, forked: bool = True, **changes: str) -> bool:
    """Start a run, kill it and all its processes at the moment; False if it ended before."""
    with runs.started(words, into=said, forked=forked, **changes) as process:
        return wait_for(moment, process)


def inside_a_step(run_dir: Path, chosen: random.Random):
    """Somewhere in the first dozens of steps after the start."""
    metrics = run_dir / "metrics.jsonl"
    before = metrics.stat().st_size if metrics.exists() else 0
    more = before + chosen.randrange(200, 8000)
    return lambda: metrics.exists() and metrics.stat().st_size > more


def inside_the_writing(run_dir: Path, chosen: random.Random):
    """A snapshot's temporary folder is there, with a random number of its files."""
    root = run_dir / "snapshots"
    count = chosen.randrange(0, 8)

    def moment() -> bool:
        try:
            building = [entry for entry in os.scandir(root) if entry.name.startswith(".tmp-step")]
            return any(len(os.listdir(folder)) >= count for folder in building)
        except FileNotFoundError:
            return False

    return moment


def after_a_rename(run_dir: Path, chosen: random.Random):
    """A snapshot has just appeared."""
    root = run_dir / "snapshots"
    before = set(os.listdir(root)) if root.exists() else set()
    return lambda: (
        root.exists() and any(name.startswith("step-") for name in set(os.listdir(root)) - before)
    )


MOMENTS = (inside_a_step, inside_the_writing, after_a_rename)


def test_killed_at_ten_moments_a_run_ends_with_the_same_bits(small, tmp_path):
    overrides = [
        *small,
        "model.dropout=0.1",
        f"train.max_steps={STEPS}",
        "train.eval_every=100",
        "snapshot.every=20",
    ]
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    assert runs.train(*overrides, f"run.dir={undisturbed}").returncode == 0
    words = runs.command(*overrides, f"run.dir={killed}")
    chosen = random.Random(2026)
    hits = dict.fromkeys((moment.__name__ for moment in MOMENTS), 0)
    for number in range(KILLS):
        moment = MOMENTS[number % len(MOMENTS)]
        hits[moment.__name__] += kill_at(words, moment(killed, chosen), tmp_path / "said")
    last = runs.run(words)
    assert last.returncode == 0, last.stderr
    print("killed:", hits)
    assert sum(hits.values()) == KILLS
    runs.assert_same_bits(runs.snapshot(undisturbed, STEPS), runs.snapshot(killed, STEPS))
    assert runs.losses(killed) == runs.losses(undisturbed)
    assert runs.metrics(killed, "eval") == runs.metrics(undisturbed, "eval")
    assert not list((killed / "snapshots").glob(".tmp-*"))


@pytest.mark.parametrize(
    ("config", "processes"),
    [
        pytest.param("cpu.yaml", 1, marks=pytest.mark.slow),
        pytest.param("ddp_cpu.yaml", 2, marks=pytest.mark.slow),
        pytest.param("ddp_cpu.yaml", 3, marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_under_a_launcher_the_bits_are_the_same(
    small, tmp_path, config, processes
):
    # Wide enough that gradients are summed in parts, in an order that depends on their place.
    wide = ["model.n_embd=128", "model.n_layer=4"]
    overrides = [*small, *wide, "model.dropout=0.1", "train.global_batch_size=12"]
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"

    def words(run_dir: Path) -> list[str]:
        options = (f"--num_processes={processes}",)
        return runs.launch_command(config, *overrides, f"run.dir={run_dir}", options=options)

    whole = runs.run(words(undisturbed))
    assert whole.returncode == 0, whole.stderr
    assert f"{processes} process" in whole.stdout
    assert ("bf16" in whole.stdout) == (config == "cpu.yaml")
    moment = after_a_rename(killed, random.Random(1))
    assert kill_at(words(killed), moment, tmp_path / "said", forked=False)
    rest = runs.run(words(killed))
    assert rest.returncode == 0, rest.stderr
    assert "step-00000010, the newest of this run" in rest.stdout
    runs.assert_same_bits(runs.snapshot(undisturbed, 30), runs.snapshot(killed, 30))
    assert runs.losses(killed) == runs.losses(undisturbed)
