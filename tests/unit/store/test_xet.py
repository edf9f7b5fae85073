"""hf_xet takes little from a training, and what its storage has lost is named."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub.utils._xet import abort_xet_session

import hubs
from common import hub_client as http
from store.errors import NoFile, StoreUnreachable
from store.hub import Hub
from store.store import Addition, Contents


@pytest.fixture
def remote(repo) -> Hub:
    return Hub(hubs.REPO, 1.0)


def upload(remote: Hub, folder: Path) -> Contents:
    """What the repo holds when a large file has been published."""
    (folder / "file").write_bytes(np.random.default_rng(0).bytes(400_000))
    return remote.publish(remote.head(), {"file.safetensors": Addition(folder / "file")}, (), "one")


def test_a_content_that_the_storage_has_lost_is_named(near_hub, remote, tmp_path):
    head = upload(remote, tmp_path)
    assert head.files == remote.head().files
    near_hub.fault("reconstruction", "status", status=404, times=None)
    with pytest.raises(NoFile, match="its content is lost"):
        remote.fetch(head, head.files, tmp_path / "back")


def test_its_threads_are_of_low_priority_and_take_no_signals(near_hub, remote, tmp_path):
    def signals() -> list[str]:
        lines = Path("/proc/self/status").read_text().splitlines()
        return [line for line in lines if line.startswith(("SigIgn", "SigCgt"))]

    def threads() -> dict[str, int]:
        """Niceness of each thread, by its number."""
        return {task: os.getpriority(os.PRIO_PROCESS, int(task)) for task in _tasks()}

    def stalled() -> None:
        with pytest.raises(StoreUnreachable):
            upload(remote, tmp_path)

    abort_xet_session()  # that of an earlier test
    before, old, own = signals(), threads(), os.getpriority(os.PRIO_PROCESS, 0)
    fault = near_hub.fault("xorb", "hang")
    thread = threading.Thread(target=stalled)
    thread.start()
    near_hub.wait_for(lambda: fault.hits)
    names = {task: Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in _tasks()}
    found = threads()
    theirs = [task for task, name in names.items() if name.startswith("hf-xet") and task not in old]
    assert theirs
    assert {found[task] for task in theirs} == {min(19, own + http.NICENESS)}
    assert found[str(threading.main_thread().native_id)] == own
    assert signals() == before
    thread.join()


def _tasks() -> list[str]:
    return os.listdir("/proc/self/task")


def test_its_settings_bound_the_memory_of_an_upload_and_may_be_others(remote, monkeypatch):
    for name, value in http.XET_SETTINGS.items():
        assert os.environ[name] == value
    name = "HF_XET_CLIENT_AC_MAX_UPLOAD_CONCURRENCY"
    monkeypatch.setenv(name, "7")
    Hub(hubs.REPO)
    assert os.environ[name] == "7"
