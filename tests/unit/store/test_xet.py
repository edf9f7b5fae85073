"""Large files through huggingface_hub and hf_xet to the loopback Hub: exact, bounded, polite."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub.utils._xet import abort_xet_session

import hubs
from common import hub_client as http
from disks import Tmpfs, mounted
from loopback_hub import LoopbackHub
from store.errors import NoFile, StoreRefused, StoreUnreachable
from store.hub import Hub
from store.store import Addition, Contents

TIMEOUT_SECONDS = 1.0


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with a repo, to which the client of this process is led."""
    with LoopbackHub(new_port=True) as hub:
        hubs.lead_here(hub, monkeypatch)
        hub.create(hubs.REPO)
        yield hub


@pytest.fixture
def remote(hub) -> Hub:
    return Hub(hubs.REPO, TIMEOUT_SECONDS)


def weights(path: Path, size: int, seed: int = 0) -> Path:
    """A file of float32 numbers, as the client meets them."""
    path.write_bytes(np.random.default_rng(seed).standard_normal(size // 4).astype("f4").tobytes())
    return path


def upload(remote: Hub, *files: Path) -> Contents:
    """What the repo holds when files have been published."""
    add = {f"{file.name}.safetensors": Addition(file) for file in files}
    return remote.publish(remote.head(), add, (), "files")


def test_what_is_uploaded_comes_back_byte_for_byte(hub, remote, tmp_path):
    files = [weights(tmp_path / f"{seed}", 1_000_000 + 4 * seed, seed) for seed in range(3)]
    head = upload(remote, *files)
    assert hub.count("xorb") > 0
    remote.fetch(head, head.files, tmp_path / "back")
    for file in files:
        assert (tmp_path / "back" / f"{file.name}.safetensors").read_bytes() == file.read_bytes()
    assert hub.count("reconstruction") > 0


def test_a_file_at_two_paths_is_uploaded_once(hub, remote, tmp_path):
    file = weights(tmp_path / "file", 400_000)
    add = {name: Addition(file) for name in ("a.safetensors", "b.safetensors")}
    head = remote.publish(remote.head(), add, (), "two")
    assert hub.count("xorb") == 1
    assert len({file.sha256 for file in head.files.values() if file.sha256}) == 1
    assert head.files == remote.head().files


@pytest.mark.parametrize("endpoint", ["xorb", "shard"])
def test_an_upload_that_hangs_ends_at_its_deadline(hub, remote, tmp_path, endpoint):
    hub.fault(endpoint, "hang")
    file, begun = weights(tmp_path / "file", 400_000), time.monotonic()
    with pytest.raises(StoreUnreachable, match="no answer in time"):
        upload(remote, file)
    assert time.monotonic() - begun < 30  # huggingface_hub would wait for 300 seconds, or for ever
    upload(remote, file)


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (401, StoreUnreachable, "cannot be reached (HTTP 401)"),  # the next has another token
        (403, StoreRefused, "refuses (HTTP 403)"),
    ],
)
def test_each_answer_of_the_storage_has_a_kind(hub, tmp_path, status, kind, message):
    hub.fault("xorb", "status", status=status, times=None)
    with pytest.raises(kind) as raised:
        upload(Hub(hubs.REPO, 30.0), weights(tmp_path / "file", 100_000))
    assert message in str(raised.value)
    assert hub.contents_endpoint not in str(raised.value)


def test_a_content_that_the_storage_has_lost_is_named(hub, remote, tmp_path):
    head = upload(remote, weights(tmp_path / "file", 400_000))
    hub.fault("reconstruction", "status", status=404, times=None)
    with pytest.raises(NoFile, match="its content is lost"):
        remote.fetch(head, head.files, tmp_path / "back")


@pytest.mark.filterwarnings("ignore:Not enough free disk space")
def test_errors_of_the_disk_are_none_of_the_hub(hub, remote, tmp_path):
    head = upload(remote, weights(tmp_path / "file", 2_000_000))
    with (
        mounted(tmp_path / "disk", lambda: Tmpfs(tmp_path / "disk", 1)),
        pytest.raises(OSError, match="No space left on device"),
    ):
        remote.fetch(head, head.files, tmp_path / "disk")


def test_its_threads_are_of_low_priority_and_take_no_signals(hub, remote, tmp_path):
    def signals() -> list[str]:
        lines = Path("/proc/self/status").read_text().splitlines()
        return [line for line in lines if line.startswith(("SigIgn", "SigCgt"))]

    def threads() -> dict[str, int]:
        """Niceness of each thread, by its number."""
        return {task: os.getpriority(os.PRIO_PROCESS, int(task)) for task in _tasks()}

    def stalled() -> None:
        with pytest.raises(StoreUnreachable):
            upload(remote, weights(tmp_path / "file", 400_000))

    abort_xet_session()  # that of an earlier test
    before, old, own = signals(), threads(), os.getpriority(os.PRIO_PROCESS, 0)
    fault = hub.fault("xorb", "hang")
    thread = threading.Thread(target=stalled)
    thread.start()
    hub.wait_for(lambda: fault.hits)
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
    Hub(hubs.REPO, TIMEOUT_SECONDS)
    assert os.environ[name] == "7"
