"""Promise 2: resume is as if nothing happened; and metrics.jsonl has every step once."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import time
from pathlib import Path

import psutil
import pytest

import runs

STEPS = 400
KILLS = 10


def wait_for(moment, process: subprocess.Popen, deadline: float = 60.0) -> bool:
    """Watch until `moment()` holds, closely enough to hit the inside of a snapshot's writing."""
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        if moment():
            return True
        if process.poll() is not None:
            return False
    raise AssertionError("the run did nothing before the deadline")


def kill_at(words: list[str], moment) -> bool:
    """Start a run, kill it and all its processes at the moment; False if it ended before."""
    process = subprocess.Popen(
        words,
        env=runs.environment(),
        cwd=runs.ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        return wait_for(moment, process)
    finally:
        # The launcher's workers are in sessions of their own, so no group holds them all.
        alive = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for one in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(alive)
        process.wait()


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
        hits[moment.__name__] += kill_at(words, moment(killed, chosen))
    last = runs.run(words)
    assert last.returncode == 0, last.stderr
    print("killed:", hits)
    assert sum(hits.values()) == KILLS
    runs.assert_same_bits(runs.snapshot(undisturbed, STEPS), runs.snapshot(killed, STEPS))
    assert runs.losses(killed) == runs.losses(undisturbed)
    assert runs.metrics(killed, "eval") == runs.metrics(undisturbed, "eval")
    assert not list((killed / "snapshots").glob(".tmp-*"))


@pytest.mark.parametrize(
    ("config", "processes"), [("cpu.yaml", 1), ("ddp_cpu.yaml", 2), ("ddp_cpu.yaml", 3)]
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
    assert kill_at(words(killed), after_a_rename(killed, random.Random(1)))
    rest = runs.run(words(killed))
    assert rest.returncode == 0, rest.stderr
    assert "step-00000010, the newest of this run" in rest.stdout
    runs.assert_same_bits(runs.snapshot(undisturbed, 30), runs.snapshot(killed, 30))
    assert runs.losses(killed) == runs.losses(undisturbed)


def test_a_finished_run_says_so_and_does_nothing(finished_run, small):
    before = (finished_run / "metrics.jsonl").read_bytes()
    result = runs.train(*small, "model.dropout=0.1", f"run.dir={finished_run}")
    assert result.returncode == 0, result.stderr
    assert "finished at step 30" in result.stdout
    assert (finished_run / "metrics.jsonl").read_bytes() == before


def test_a_larger_max_steps_extends_a_finished_run(small, tmp_path):
    run_dir = f"run.dir={tmp_path / 'run'}"
    assert runs.train(*small, run_dir, "train.max_steps=10").returncode == 0
    result = runs.train(*small, run_dir, "train.max_steps=20")
    assert result.returncode == 0, result.stderr
    assert "train.max_steps: 10 -> 20" in result.stdout
    assert len(runs.losses(tmp_path / "run")) == 20
    assert [record["step"] for record in runs.metrics(tmp_path / "run", "eval")] == [10, 15, 20]


def test_never_starts_over_and_moves_the_earlier_run_aside(small, tmp_path):
    run_dir = tmp_path / "run"
    assert runs.train(*small, f"run.dir={run_dir}", "train.max_steps=10").returncode == 0
    result = runs.train(*small, f"run.dir={run_dir}", "train.max_steps=5", "snapshot.resume=never")
    assert result.returncode == 0, result.stderr
    assert len(runs.losses(run_dir)) == 5
    assert len(runs.losses(tmp_path / "run.old-1")) == 10


def test_a_named_snapshot_starts_a_new_run_which_the_same_command_continues(
    finished_run, small, tmp_path
):
    words = [
        *small,
        "model.dropout=0.1",
        f"run.dir={tmp_path / 'run'}",
        f"snapshot.resume={runs.snapshot(finished_run, 20)}",
    ]
    result = runs.train(*words)
    assert result.returncode == 0, result.stderr
    runs.assert_same_bits(runs.snapshot(finished_run, 30), runs.snapshot(tmp_path / "run", 30))
    assert [record["step"] for record in runs.metrics(tmp_path / "run")] == list(range(21, 31))
    again = runs.train(*words)
    assert again.returncode == 0, again.stderr
    assert "finished at step 30" in again.stdout


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("train.seed=5", "train.seed: 1337 in the snapshot, 5 now"),
        ("model.n_embd=64", "model.n_embd: 32 in the snapshot, 64 now"),
        ("data.source=python-docs", "vocabulary: "),
        ("data.val_fraction=0.2", "text: "),
        ("train.global_batch_size=4", "train.global_batch_size: 8 in the snapshot, 4 now"),
    ],
)
def test_another_problem_in_the_same_run_is_refused(finished_run, small, change, named):
    before = sorted(path.name for path in finished_run.iterdir())
    result = runs.train(*small, "model.dropout=0.1", f"run.dir={finished_run}", change)
    assert result.returncode == 2
    assert named in result.stderr
    assert "another run.name" in result.stderr
    assert sorted(path.name for path in finished_run.iterdir()) == before
