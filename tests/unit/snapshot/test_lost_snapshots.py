"""A run of which only the metrics are left does not begin again in silence."""

from __future__ import annotations

import pytest

from small_snapshots import trained, write
from snapshot.errors import SnapshotError
from snapshot.start import choose_start
from training.run.run_dir import RunLock

STEP = '{"event": "train", "step": 1, "loss": 1.0}\n'
BEGUN = '{"time": "2026-11-28T10:00:00Z", "event": "start", "step": 0, "text": "from scratch"}\n'


@pytest.mark.parametrize(
    ("metrics", "snapshots", "warning"),
    [
        (None, 0, None),
        ("", 0, None),
        (BEGUN, 0, None),  # killed, or refused, between its first line and its first step
        (STEP, 0, "has no snapshot: the run begins again at step 1"),
        (STEP, 1, None),
    ],
)
def test_a_run_that_begins_again_says_so_if_it_had_steps(tmp_path, metrics, snapshots, warning):
    RunLock().acquire(tmp_path)
    assert (tmp_path / "snapshots").is_dir()
    if metrics is not None:
        (tmp_path / "metrics.jsonl").write_text(metrics)
    if snapshots:
        write(tmp_path / "snapshots", 1, *trained(1))
    start = choose_start(tmp_path, "auto")
    assert (start.folder is not None) == bool(snapshots)
    assert [warning in said for said in start.warnings] == [True] * (warning is not None)


def test_snapshots_that_are_gone_are_missed(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text(STEP)
    RunLock().acquire(run_dir)
    with pytest.raises(SnapshotError, match=r"its snapshots are gone.*move .*run away"):
        choose_start(run_dir, "auto")
    assert (run_dir / "metrics.jsonl").read_text() == STEP
