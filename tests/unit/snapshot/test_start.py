"""What an attempt begins from: its own newest, a named snapshot, or what all machines can have."""

from __future__ import annotations

import shutil
from dataclasses import replace
from unittest.mock import Mock

import pytest

import hubs
import runs
from config.compose import load_config
from small_snapshots import trained, write
from snapshot.disk.folder import manifest_sha256
from snapshot.errors import SnapshotError
from snapshot.start import choose_start
from store.attempt import Attempt
from store.errors import StoreMoved, StoreUnreachable
from store.fence import Fenced
from training.run.run_dir import RunLock
from training.run.start import fetch_chosen

STEP = '{"event": "train", "step": 1, "loss": 1.0}\n'
BEGUN = '{"time": "2026-11-28T10:00:00Z", "event": "start", "step": 0, "text": "from scratch"}\n'


@pytest.mark.parametrize(
    ("metrics", "snapshots", "warning"),
    [
        ("", 0, None),
        (BEGUN, 0, None),  # killed, or refused, between its first line and its first step
        (STEP, 0, "there is no snapshot in"),
        (STEP, 1, None),
    ],
)
def test_a_run_that_begins_again_says_so_if_it_had_steps(tmp_path, metrics, snapshots, warning):
    RunLock().acquire(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(metrics)
    if snapshots:
        write(tmp_path / "snapshots", 1, *trained(1))
    start = choose_start(tmp_path, "auto")
    assert (start.folder is not None) == bool(snapshots)
    assert [warning in said for said in start.warnings] == [True] * (warning is not None)


def test_snapshots_that_are_gone_are_missed(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(STEP)
    RunLock().acquire(tmp_path)
    with pytest.raises(SnapshotError, match=r"there is no snapshot in .*move .* away"):
        choose_start(tmp_path, "auto")
    assert (tmp_path / "metrics.jsonl").read_text() == STEP


def for_all(seconds: float = 5.0):
    return replace(hubs.store(seconds), for_all=True)


@pytest.mark.parametrize("uploaded", [[], [20], [20, 30]], ids=str)
def test_what_one_disk_has_is_uploaded_before_the_others_begin(
    near_hub, finished_run, tmp_path, uploaded
):
    """The machine was killed after a snapshot and before its upload."""
    if uploaded:
        hubs.seed(near_hub, *(runs.snapshot(finished_run, step) for step in uploaded))
    run_dir = shutil.copytree(finished_run, tmp_path / "first")
    start = choose_start(run_dir, "auto", for_all())
    assert (start.folder, start.state.step) == (runs.snapshot(run_dir, 30), 30)
    assert start.warnings == ()
    assert start.remote is not None  # for the other machines
    other = choose_start(tmp_path / "other", "auto", for_all())
    assert other.state.step == 30
    assert manifest_sha256(other.folder) == manifest_sha256(start.folder)
    repo = near_hub.repo(hubs.REPO)
    assert hubs.steps_at_head(repo) == (uploaded if 30 in uploaded else [*uploaded, 30])


@pytest.mark.parametrize("error", [Fenced("another"), StoreMoved("moved on")], ids=repr)
def test_another_start_that_uploads_meanwhile_is_no_mistake(
    near_hub, finished_run, monkeypatch, error
):
    near_hub.create(hubs.REPO)
    monkeypatch.setattr(Attempt, "upload", Mock(side_effect=error))
    with pytest.raises(StoreUnreachable, match="another start has uploaded"):
        choose_start(finished_run, "auto", for_all())


def test_a_takeover_uploads_before_the_others_begin(near_hub, finished_run, tmp_path):
    """The store holds another run until then."""
    run_dir = shutil.copytree(finished_run, tmp_path / "run")
    hubs.put(near_hub, runs.snapshot(finished_run, 20), 20, run="f" * 32)
    with pytest.raises(SnapshotError, match="holds another run than"):
        choose_start(run_dir, "auto", for_all())
    start = choose_start(run_dir, "auto", replace(for_all(), takeover=True))
    assert start.state.step == 30
    assert start.remote is not None  # for the other machines
    assert hubs.latest(near_hub)["run_id"] == start.state.run_id


@pytest.mark.parametrize("is_down", [False, True])
def test_without_the_store_no_machine_begins(near_hub, finished_run, is_down):
    """The same command may succeed later: a loop tries it again."""
    hubs.seed(near_hub, runs.snapshot(finished_run, 20))
    near_hub.down() if is_down else near_hub.fault("commit", "status", status=503, times=None)
    words = "snapshot of this run" if is_down else "503"
    with pytest.raises(StoreUnreachable, match=words):
        choose_start(finished_run, "auto", for_all(1.0))


def test_a_machine_that_lacks_the_snapshot_says_what_to_do(tmp_path):
    config = load_config([f"run.dir={tmp_path}"])
    with pytest.raises(SnapshotError, match=r"missing or damaged on this machine: copy it here, "):
        fetch_chosen(tmp_path / "snapshots" / "step-00000030", "0" * 64, None, config)
