"""Promise 2, the hard way: killed at any moment, a run ends with the bits of one that was not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import runs
from kills import after_a_rename, inside_a_step, inside_the_writing, kill_at

STEPS = 400
KILLS = 10


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
    runs.run(words, code=0)
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
        pytest.param("cp_cpu.yaml", 2, marks=pytest.mark.slow),
        pytest.param("tp_cpu.yaml", 2, marks=pytest.mark.slow),
        pytest.param("fsdp_tp_cpu.yaml", 4, marks=pytest.mark.slow),
    ],
)
def test_killed_under_a_launcher_the_bits_are_the_same(small, tmp_path, config, processes):
    # Wide enough that gradients are summed in parts, in an order that depends on their place.
    wide = ["model.n_embd=128", "model.n_layer=4"]
    overrides = [*small, *wide, "model.dropout=0.1", "train.global_batch_size=12"]
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"

    def words(run_dir: Path) -> list[str]:
        options = (f"--num_processes={processes}",)
        arguments = (*runs.WITH_BF16, *overrides, f"run.dir={run_dir}")
        return runs.launch_command(config, *arguments, options=options, script=runs.ON_CPU)

    whole = runs.run(words(undisturbed), code=0)
    assert f"{processes} process" in whole.stdout
    assert ("bf16" in whole.stdout) == (config == "cpu.yaml")
    moment = after_a_rename(killed, random.Random(1))
    assert kill_at(words(killed), moment, tmp_path / "said", forked=False)
    rest = runs.run(words(killed), code=0)
    assert "step-00000010, the newest of this run" in rest.stdout
    runs.assert_same_bits(runs.snapshot(undisturbed, 30), runs.snapshot(killed, 30))
    assert runs.losses(killed) == runs.losses(undisturbed)


def saved_steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in run_dir.glob("snapshots/step-????????"))


@pytest.mark.slow
def test_an_interval_of_the_clock_changes_no_bit(small, tmp_path):
    """Two processes save at the same steps, are killed, and end with the bits of a fixed one."""
    steps = 150
    overrides = [
        *(word for word in small if not word.startswith("snapshot.every=")),
        *("model.dropout=0.1", f"train.max_steps={steps}", "snapshot.keep=1000"),
        *("train.eval_every=75", "train.sample_every=0", "train.log_every=5"),
    ]
    fixed, chosen = tmp_path / "fixed", tmp_path / "chosen"
    runs.launch("ddp_cpu.yaml", *overrides, "snapshot.every=1000", f"run.dir={fixed}", code=0)
    by_the_clock = [*overrides, "snapshot.every_minutes=0.01", f"run.dir={chosen}"]
    words = runs.launch_command("ddp_cpu.yaml", *by_the_clock)
    moment = after_a_rename(chosen, random.Random(1))
    assert kill_at(words, moment, tmp_path / "said", forked=False)
    rest = runs.run(words, code=0)
    assert "2 processes" in rest.stdout
    assert len(saved_steps(chosen)) > len(saved_steps(fixed)) == 1
    runs.assert_same_bits(runs.snapshot(fixed, steps), runs.snapshot(chosen, steps))
    assert runs.losses(chosen) == runs.losses(fixed)
