"""A run of which only the metrics are left does not begin again in silence."""

from __future__ import annotations

import pytest

from small_snapshots import trained, write
from snapshot.errors import SnapshotError
from snapshot.start import choose_start
from training.reporting.console import Events
from training.reporting.metrics import MetricsFile
from training.run.run_dir import RunLock

LINE = '{"event": "train", "step": 1, "loss": 1.0}\n'


def test_a_start_makes_the_snapshot_folder_before_any_step(tmp_path):
    RunLock().acquire(tmp_path)
    assert (tmp_path / "snapshots").is_dir()
    (tmp_path / "metrics.jsonl").write_text("")
    assert choose_start(tmp_path, "auto").warnings == ()


def test_a_run_that_only_began_has_no_steps(tmp_path):
    """It was killed, or refused, between its first line and its first step."""
    RunLock().acquire(tmp_path)
    Events(MetricsFile(tmp_path / "metrics.jsonl", 0), "a" * 32).add("start", 0, "from scratch")
    assert choose_start(tmp_path, "auto").warnings == ()


def test_snapshots_that_are_gone_are_missed(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text(LINE)
    RunLock().acquire(run_dir)
    with pytest.raises(SnapshotError, match=r"its snapshots are gone.*move .*run away"):
        choose_start(run_dir, "auto")
    assert (run_dir / "metrics.jsonl").read_text() == LINE


def test_a_run_killed_before_its_first_snapshot_begins_again(tmp_path):
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "metrics.jsonl").write_text(LINE)
    RunLock().acquire(tmp_path)
    start = choose_start(tmp_path, "auto")
    assert start.folder is None
    assert "has no snapshot: the run begins again at step 1" in start.warnings[0]


def test_a_run_with_a_snapshot_has_no_such_warning(tmp_path):
    write(tmp_path / "snapshots", 1, *trained(1))
    (tmp_path / "metrics.jsonl").write_text(LINE)
    RunLock().acquire(tmp_path)
    assert choose_start(tmp_path, "auto").warnings == ()
