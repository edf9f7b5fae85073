"""A repo of the Hub: one warning for a fault, a bounded start, and what a start can do without."""

from __future__ import annotations

import shutil
import tempfile
import time

import pytest
from huggingface_hub import constants

import hubs
import runs
from config.compose import load_config
from disks import Tmpfs, mounted
from snapshot.disk.state import read_state
from snapshot.errors import DiskFault
from snapshot.start import RunStore, Start, choose_start, newest_of_disk_and_store
from store.attempt import Card
from store.fetch import INFERENCE, fetch_newest, read_store
from store.files import Disk
from store.hub import Hub
from store.kinds import open_store
from training.run.records import begin_uploads

pytestmark = pytest.mark.filterwarnings(
    "ignore:Use 'content=:DeprecationWarning"  # huggingface_hub 2.4 calls httpx2 so
)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "manifest.json"])
def test_a_damaged_file_in_the_cache_is_downloaded_again(
    near_hub, finished_run, tmp_path, monkeypatch, name
):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    hubs.put(near_hub, runs.snapshot(finished_run, 30), 30)
    for damage in (
        lambda content: content[: len(content) // 2],
        lambda content: content[:-2] + b"!}",
    ):
        file = fetch_newest(read_store(Hub(hubs.REPO)), wanted=INFERENCE).path / name
        sound = file.read_bytes()
        file.resolve().write_bytes(damage(sound))
        assert fetch_newest(read_store(Hub(hubs.REPO)), wanted=INFERENCE).path / name == file
        assert file.read_bytes() == sound


def test_a_fault_is_one_warning_and_a_word_in_the_progress(near_hub, finished_run, monkeypatch):
    monkeypatch.setattr("store.uploader.FIRST_DELAY_SECONDS", 0.01)
    near_hub.create(hubs.REPO)
    fault = near_hub.fault(
        "commit", "status", status=500, times=None, message="the disk is on fire"
    )
    uploads = hubs.uploader()
    uploads.offer(runs.snapshot(finished_run, 30), Card("# 30\n"))
    near_hub.wait_for(lambda: fault.hits >= 5)
    assert uploads.status().as_words() == "hub has none yet, last error: HTTP 500"
    assert "the disk is on fire" in uploads.status().failure_text
    (message,) = uploads.messages()
    assert "the Hub cannot be reached (HTTP 500: the disk is on fire)" in message
    near_hub.clear_faults()
    assert uploads.flush(300)
    assert uploads.status().as_words().startswith("hub at step 30, 0:")
    assert uploads.messages() == []


@pytest.fixture
def full_temporary_folder(tmp_path, monkeypatch):
    """Every temporary folder is on a full disk, and the client's home on one that is read-only."""
    with (
        mounted(tmp_path / "tmp", lambda: Tmpfs(tmp_path / "tmp", 1)) as full,
        mounted(tmp_path / "home", lambda: Tmpfs(tmp_path / "home", 1)) as home,
    ):
        full.fill()
        home.make_read_only()
        monkeypatch.setattr(tempfile, "tempdir", str(full.folder))
        monkeypatch.setattr(constants, "HF_HOME", str(home.folder))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home.folder / "hub"))
        yield


@pytest.mark.parametrize("kind", ["a repo", "a folder"])
def test_a_start_needs_neither_a_temporary_folder_nor_a_home(
    near_hub, finished_run, tmp_path, request, kind
):
    newest = runs.snapshot(finished_run, 30)
    remote = Disk(f"file://{tmp_path}/shared", 5.0)
    if kind == "a repo":
        remote = Hub(hubs.REPO, 5.0)
        hubs.seed(near_hub, newest)
    else:
        hubs.upload(remote, newest)
    request.getfixturevalue("full_temporary_folder")
    store = RunStore(remote, private=True, takeover=False)
    start = newest_of_disk_and_store(store, Start(newest, read_state(newest), ""), newest.parent)
    assert start.folder == newest
    assert start.warnings == ()
    assert start.known_latest.step == 30
    begun = choose_start(tmp_path / "other", "auto", store)
    assert "fetched from" in begun.reason


@pytest.mark.filterwarnings("ignore:Not enough free disk space")
def test_a_disk_that_refuses_a_download_is_not_the_repo_s_fault(
    near_hub, finished_run, tmp_path, small_disk, full_temporary_folder
):
    hubs.seed(near_hub, runs.snapshot(finished_run, 10), runs.snapshot(finished_run, 30))
    with pytest.raises(DiskFault) as caught:
        fetch_newest(read_store(Hub(hubs.REPO, 5.0)), wanted=INFERENCE)
    assert str(caught.value).endswith(
        f"cannot be written to {tmp_path / 'home'}: Read-only file system. Make that folder "
        "writable, or set HF_HOME to another."
    )
    newest = runs.snapshot(small_disk.folder / "run", 10)
    shutil.copytree(runs.snapshot(finished_run, 10), newest)
    small_disk.fill()
    start = choose_start(small_disk.folder / "run", "auto", hubs.store())
    assert start.state.step == 10
    (warning,) = start.warnings
    assert warning.endswith("No space left on device. Free some space there.")
    for resume in ("auto", "me/run"):
        with pytest.raises(DiskFault, match=r"No space left on device\. Free some space there\.$"):
            choose_start(small_disk.folder / "other", resume, hubs.store())


def test_a_process_without_the_hub_says_so_once(
    near_hub, finished_run, small, tmp_path, monkeypatch
):
    hubs.seed(near_hub, runs.snapshot(finished_run, 10))
    monkeypatch.setattr("common.retries.FIRST_DELAY_SECONDS", 60.0)
    monkeypatch.setattr("common.retries.BRIEF_DELAY_SECONDS", 60.0)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    began = time.monotonic()
    start = choose_start(finished_run, "auto", hubs.store())
    assert start.warnings == (
        "HF_HUB_OFFLINE is set, so the Hub is not used. The run continues without it.",
    )
    config = load_config([*small, *hubs.words(finished_run)])
    assert begin_uploads(None, config, start, start.state) is None
    bucket = "hf://buckets/me/run"
    config = load_config([*small, f"run.dir={finished_run}", f"hub.url={bucket}"])
    assert begin_uploads(None, config, start, start.state) is None
    for own in (hubs.store(), RunStore(open_store(bucket, 5.0), True, False)):
        with pytest.raises(Exception, match=r"HF_HUB_OFFLINE is set.* a run that is new"):
            choose_start(tmp_path / "empty", "auto", own)
    assert time.monotonic() - began < 30
