"""Promise 2: resume is as if nothing happened, and refuses what would be another run."""

from __future__ import annotations

import json
import shutil

import pytest

import runs
from sealed import seal
from snapshot.disk.folder import MANIFEST, read_json, snapshot_folders, snapshots_in
from snapshot.disk.state import STATE


def test_a_finished_run_says_so_and_does_nothing(finished_run, small):
    before = runs.metrics(finished_run)
    result = runs.train(*small, "model.dropout=0.1", f"run.dir={finished_run}", code=0)
    assert "finished at step 30" in result.stdout
    assert runs.metrics(finished_run) == before


def test_a_larger_max_steps_extends_a_finished_run(small, tmp_path):
    run_dir = f"run.dir={tmp_path / 'run'}"
    assert runs.train(*small, run_dir, "train.max_steps=10").returncode == 0
    result = runs.train(*small, run_dir, "train.max_steps=20", code=0)
    assert "train.max_steps: 10 -> 20" in result.stdout
    assert len(runs.losses(tmp_path / "run")) == 20
    assert [record["step"] for record in runs.metrics(tmp_path / "run", "eval")] == [10, 15, 20]


def test_a_named_snapshot_starts_a_run_that_continues_itself(finished_run, small, tmp_path):
    words = [
        *small,
        "model.dropout=0.1",
        f"run.dir={tmp_path / 'run'}",
        f"snapshot.resume={runs.snapshot(finished_run, 20)}",
    ]
    runs.train(*words, code=0)
    runs.assert_same_bits(runs.snapshot(finished_run, 30), runs.snapshot(tmp_path / "run", 30))
    assert [record["step"] for record in runs.metrics(tmp_path / "run")] == list(range(21, 31))
    again = runs.train(*words, code=0)
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
    result = runs.train(*small, "model.dropout=0.1", f"run.dir={finished_run}", change, code=2)
    assert named in result.stderr
    assert "another run.name" in result.stderr
    assert sorted(path.name for path in finished_run.iterdir()) == before


def test_a_run_of_0_1_0_is_refused_and_its_weights_train_on(finished_run, small, tmp_path):
    run_dir = shutil.copytree(finished_run, tmp_path / "run")
    for folder in snapshot_folders(snapshots_in(run_dir)):
        state = read_json(folder / STATE)
        (folder / STATE).write_text(json.dumps({**state, "format_version": 1}))
        (folder / MANIFEST).unlink()
        seal(folder)
    newest = runs.snapshot(run_dir, 30)
    result = runs.train(
        *small, "model.dropout=0.1", f"run.dir={run_dir}", "train.max_steps=31", code=2
    )
    weights = f"model.pretrained={newest}"
    assert f"was written by 0.1.0: train on from its weights with {weights}" in result.stderr
    own = [word for word in small if not word.startswith("model.n_")]
    runs.train(*own, weights, f"run.dir={tmp_path / 'next'}", "train.max_steps=1", code=0)
