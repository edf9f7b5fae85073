"""A Hub that hangs costs a start a bounded time, whatever it hangs at."""

from __future__ import annotations

import shutil
import time

import pytest

import hubs
import runs
from config.compose import load_config
from snapshot.start import choose_start
from store.errors import StoreUnreachable
from store.fetch import PARTIAL
from training.run.records import fetch_missing

# A request that is given up ends after its test, with a connection that nobody closes.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
TIMEOUT_SECONDS = 2.0
LONGEST_SECONDS = 5 * (TIMEOUT_SECONDS + 1.0)
"""A transfer is tried four times, within seconds each; and this machine is slow."""


@pytest.fixture
def behind(near_hub, finished_run, tmp_path, monkeypatch):
    """A run at step 10 on this disk, and at step 30 in its repo."""
    hubs.hurry(monkeypatch)
    hubs.seed(near_hub, runs.snapshot(finished_run, 10), runs.snapshot(finished_run, 30))
    lines = (finished_run / "metrics.jsonl").read_bytes()
    near_hub.commit_files(hubs.REPO, {"metrics.jsonl": lines})
    run_dir = tmp_path / "run"
    shutil.copytree(runs.snapshot(finished_run, 10), runs.snapshot(run_dir, 10))
    return run_dir


@pytest.mark.parametrize(
    ("near_hub", "endpoint"),
    [
        *(("Xet", endpoint) for endpoint in ("*", "whoami", "tree", "resolve-get", "xorb-get")),
        pytest.param("LFS", "blob-get", marks=pytest.mark.thorough),
        pytest.param("Xet", "records", marks=pytest.mark.thorough),
    ],
    indirect=["near_hub"],
)
def test_a_start_with_a_snapshot_goes_on_without_it(near_hub, behind, small, endpoint):
    """Silence at the first question, at a later one, and in the middle of a download."""
    own = hubs.store(TIMEOUT_SECONDS)
    said = []
    if endpoint != "records":
        near_hub.fault(endpoint, "hang", times=None)
    before = time.monotonic()
    begun = choose_start(behind, "auto", own)
    said.extend(begun.warnings)
    assert begun.state.step == (30 if endpoint in ("whoami", "records") else 10)
    if endpoint == "records":
        near_hub.fault("*", "hang", times=None)
    config = load_config([*small, f"run.dir={behind}"])
    said.extend(filter(None, [fetch_missing(config, begun, begun.state)]))
    assert time.monotonic() - before < LONGEST_SECONDS
    assert endpoint == "whoami" or len(said) >= 1
    left = {path.name for path in behind.glob("snapshots/.tmp-*")}
    assert left <= {PARTIAL}  # which the run removes as it opens


@pytest.mark.parametrize(
    ("resume", "message"),
    [("auto", "unknown whether me/run holds a snapshot"), (hubs.REPO, "no answer in time")],
)
def test_a_start_without_a_snapshot_stops(near_hub, tmp_path, resume, message):
    near_hub.fault("*", "hang", times=None)
    own = hubs.store(TIMEOUT_SECONDS) if resume == "auto" else None
    before = time.monotonic()
    with pytest.raises(StoreUnreachable, match=message):
        choose_start(tmp_path / "run", resume, own, TIMEOUT_SECONDS)
    # The client may repeat a request itself, which is given up after its time.
    assert time.monotonic() - before < TIMEOUT_SECONDS + 5
