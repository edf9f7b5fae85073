"""A Hub that hangs costs a start `hub.timeout_seconds` in all, whatever it hangs at."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

import hubs
import runs
from config.compose import load_config
from snapshot.start import choose_start
from store.errors import HubSilent, HubUnreachable
from store.fetch import fetch_small
from store.repo import Hub
from training.reporting.events import Events
from training.run.records import fetch_missing

TIMEOUT_SECONDS = 5.0
SLACK_SECONDS = 4.9
"""Less than a second limit would add. The client waits a second before its own retry."""


@pytest.fixture
def behind(near_hub, finished_run, tmp_path):
    """A run at step 10 on this disk, and at step 30 in its repo."""
    hubs.seed(near_hub, runs.snapshot(finished_run, 10), runs.snapshot(finished_run, 30))
    lines = (finished_run / "metrics.jsonl").read_bytes()
    near_hub.commit_files(hubs.REPO, {"metrics/from-00000001.jsonl": lines})
    run_dir = tmp_path / "run"
    shutil.copytree(runs.snapshot(finished_run, 10), runs.snapshot(run_dir, 10))
    return run_dir


def seconds_of(start) -> float:
    began = time.monotonic()
    start()
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("near_hub", "endpoint"),
    [
        *(("Xet", endpoint) for endpoint in ("*", "whoami", "tree", "resolve-get", "xorb-get")),
        ("LFS", "blob-get"),
        ("Xet", "records"),
    ],
    indirect=["near_hub"],
)
def test_a_start_with_a_snapshot_waits_once(near_hub, behind, small, endpoint):
    """Silence at the first question, at a later one, and in the middle of a download."""
    own = hubs.store(TIMEOUT_SECONDS)
    said = []

    def start() -> None:
        begun = choose_start(behind, "auto", own)
        said.extend(begun.warnings)
        assert begun.state.step == (30 if endpoint in ("whoami", "records") else 10)
        if endpoint == "records":
            near_hub.fault("*", "hang", times=None)
        config = load_config([*small, f"run.dir={behind}"])
        console = SimpleNamespace(warn=said.append)
        events = Events(behind / "events.jsonl", begun.state.attempt_id)
        fetch_missing(console, events, config, begun, begun.state)

    if endpoint != "records":
        near_hub.fault(endpoint, "hang", times=None)
    assert seconds_of(start) < TIMEOUT_SECONDS + SLACK_SECONDS
    assert endpoint == "whoami" or len(said) >= 1
    assert not list(behind.glob("snapshots/.tmp-*"))


def test_a_start_without_a_snapshot_waits_once_and_stops(near_hub, tmp_path):
    near_hub.fault("*", "hang", times=None)
    own = hubs.store(TIMEOUT_SECONDS)

    def start() -> None:
        for _ in range(2):
            with pytest.raises(HubUnreachable, match="unknown whether me/run holds a snapshot"):
                choose_start(tmp_path / "run", "auto", own)

    assert seconds_of(start) < TIMEOUT_SECONDS + SLACK_SECONDS


def test_only_silence_counts(near_hub, finished_run, tmp_path):
    """A download may last longer than the limit; bytes that came are no waiting."""
    hubs.seed(near_hub, runs.snapshot(finished_run, 30))
    hub = Hub(hubs.REPO, 0.3)
    near_hub.fault("resolve-get", "hang", times=1)
    with hub.waiting.limit():
        for _ in range(3):
            head, _ = hub.head()
            time.sleep(0.15)  # between two answers nobody waits
        files = hub.files(head)
        with pytest.raises(HubUnreachable, match="did not answer in time"):
            hub.latest(head, files)
        with pytest.raises(HubSilent, match=r"has not answered for 0\.3 seconds"):
            hub.head()
    hub.head()  # the limit is that of the start


def test_the_second_look_of_a_start_asks_for_the_head_alone(near_hub, finished_run, tmp_path):
    """It finds what came meanwhile, and waits no longer than the first has left."""
    hubs.seed(near_hub, runs.snapshot(finished_run, 10))
    own = hubs.store(TIMEOUT_SECONDS)
    first = choose_start(tmp_path / "run", "auto", own, fetch=fetch_small)
    assert (first.state.step, first.is_whole) == (10, False)
    again = replace(own, hub=first.repo.hub, known=first.repo)
    listings = near_hub.count("tree")
    whole = choose_start(tmp_path / "run", "auto", again)
    assert (whole.state.step, whole.is_whole, near_hub.count("tree")) == (10, True, listings)
    shutil.rmtree(whole.folder)
    hubs.put(near_hub, runs.snapshot(finished_run, 30), 30, run=first.state.run_id)
    assert choose_start(tmp_path / "run", "auto", again).state.step == 30
    own.hub.waiting._left = 0.0
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(HubUnreachable):
        choose_start(tmp_path / "run", "auto", again)
