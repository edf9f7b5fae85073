"""What a start can do without never ends it, and what cannot succeed is not waited for."""

from __future__ import annotations

import shutil
import tempfile
import time

import pytest
from huggingface_hub import constants

import hubs
import runs
import sample
from config.compose import load_config
from disks import Tmpfs, mounted
from snapshot.disk.state import read_state
from snapshot.errors import DiskFault
from snapshot.start import RunStore, Start, choose_start, newest_of_disk_and_store
from store.fetch import INFERENCE, fetch_newest, read_store
from store.files import Disk
from store.hub import Hub
from training.run.uploading import begin_uploads


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
    assert begun.fetched


@pytest.mark.filterwarnings("ignore:Not enough free disk space")
def test_a_disk_that_refuses_a_download_is_not_the_repo_s_fault(
    near_hub, finished_run, tmp_path, small_disk, full_temporary_folder
):
    hubs.seed(near_hub, runs.snapshot(finished_run, 10), runs.snapshot(finished_run, 30))
    with pytest.raises(DiskFault) as caught:
        fetch_newest(read_store(Hub(hubs.REPO, 5.0)), wanted=INFERENCE)
    assert str(caught.value) == (
        f"the Hub client's cache, {tmp_path / 'home' / 'hub'}, cannot be written: Read-only file "
        "system. Set HF_HOME to a folder that can be written."
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


@pytest.mark.parametrize("fault", ["a file", "read-only"])
def test_a_home_that_cannot_be_used_is_named_once(
    near_hub, finished_run, tmp_path, monkeypatch, fault, capsys
):
    """HF_HOME below a file, or one that nobody may write to, is no fault of the repo."""
    hubs.seed(near_hub, *(runs.snapshot(finished_run, step) for step in (10, 20, 30)))
    home = tmp_path / "home"
    with mounted(home, lambda: Tmpfs(home, 1)) as disk:
        if fault == "read-only":
            disk.make_read_only()
        else:
            home = home / "file" / "x"
            home.parent.touch()
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        assert sample.main([hubs.REPO]) == 2
        said = capsys.readouterr().err
        assert said.startswith(
            f"error: the Hub client's cache, {home / 'hub'}, cannot be written: "
        )
        assert said.endswith(". Set HF_HOME to a folder that can be written.\n")
        assert said.count("cannot be written") == 1
        if fault == "read-only":
            return
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        start = choose_start(finished_run, "auto", hubs.store())
        (warning,) = start.warnings
        assert warning.startswith(f"the file of the token, {home / 'token'}, cannot be read: ")
        assert "Set HF_TOKEN, or HF_HOME to a folder that can be used." in warning


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
    with pytest.raises(Exception, match=r"HF_HUB_OFFLINE is set.* a run that is new"):
        choose_start(tmp_path / "empty", "auto", hubs.store())
    assert time.monotonic() - began < 30
