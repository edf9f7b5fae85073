"""What machines with disks of their own begin from: what the store has, or a sentence."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import hubs
import runs
from config.compose import load_config
from snapshot.disk.folder import manifest_sha256
from snapshot.errors import SnapshotError
from snapshot.start import choose_start
from store.errors import StoreUnreachable
from training.run.start import Chosen


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
    assert (start.fetched, start.warnings) == (False, ())
    assert start.remote is not None  # for the other machines
    other = choose_start(tmp_path / "other", "auto", for_all())
    assert (other.state.step, other.fetched) == (30, True)
    assert manifest_sha256(other.folder) == manifest_sha256(start.folder)
    repo = near_hub.repo(hubs.REPO)
    assert hubs.steps_at_head(repo) == (uploaded if 30 in uploaded else [*uploaded, 30])
    generations = [one["generation"] for one in hubs.all_latest(near_hub)]
    assert generations == sorted(generations)


def test_the_newest_of_the_store_is_used_where_the_disk_has_an_older_one(
    near_hub, finished_run, tmp_path
):
    hubs.seed(near_hub, runs.snapshot(finished_run, 30))
    run_dir = shutil.copytree(finished_run, tmp_path / "run")
    shutil.rmtree(runs.snapshot(run_dir, 30))
    start = choose_start(run_dir, "auto", for_all())
    assert (start.state.step, start.fetched) == (30, True)


def test_a_takeover_uploads_before_the_others_begin(near_hub, finished_run, tmp_path):
    """The store holds another run until then."""
    run_dir = shutil.copytree(finished_run, tmp_path / "run")
    hubs.put(near_hub, runs.snapshot(finished_run, 20), 20, run="f" * 32)
    with pytest.raises(SnapshotError, match="holds another run than"):
        choose_start(run_dir, "auto", for_all())
    start = choose_start(run_dir, "auto", replace(for_all(), takeover=True))
    assert (start.state.step, start.fetched) == (30, False)
    assert start.remote is not None  # for the other machines
    assert hubs.latest(near_hub)["run_id"] == start.state.run_id


@pytest.mark.parametrize("is_down", [False, True])
def test_without_the_store_no_machine_begins(near_hub, finished_run, is_down):
    """The same command may succeed later: a loop tries it again."""
    hubs.seed(near_hub, runs.snapshot(finished_run, 20))
    near_hub.down() if is_down else near_hub.fault("commit", "status", status=503, times=None)
    words = "snapshot of this run, and none is on all machines" if is_down else "503"
    with pytest.raises(StoreUnreachable, match=words):
        choose_start(finished_run, "auto", for_all(1.0 if is_down else 5.0))


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("run.name=run", "copy it here, give hub.url, or one run.dir on a shared disk"),
        (
            "hub.url=s3://mine/run",
            "copy it here, or start on the first machine alone until it is in s3://mine/run",
        ),
        (
            "snapshot.resume=/nowhere/step-00000030",
            "copy it here, or put it on a disk that all machines share",
        ),
    ],
)
def test_a_machine_that_lacks_the_snapshot_says_what_to_do(finished_run, tmp_path, key, remedy):
    config = load_config([f"run.dir={tmp_path / 'own disk'}", key])
    identity = manifest_sha256(runs.snapshot(finished_run, 30))
    is_named = key.startswith("snapshot.resume")
    place = key.partition("=")[2] if is_named else "step-00000030"
    chosen = Chosen(identity, place, remote=None)
    with pytest.raises(SnapshotError) as caught:
        chosen.on_other_machine(config, fetches=True)
    root = Path("/nowhere") if is_named else tmp_path / "own disk" / "snapshots"
    folder = root / "step-00000030"
    assert str(caught.value) == f"{folder} is missing or damaged on this machine: {remedy}."
