"""Transfers through Xet, with hf_xet itself against the loopback Hub: exact, watched, polite."""

from __future__ import annotations

import os
import threading
import time
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants

import hubs
import runs
from loopback_deviations import Deviations
from loopback_hub import LoopbackHub
from store import xet
from store.errors import HubRefused, HubUnreachable
from store.store import RemoteFile
from store.xet import NoXet, XetStorage


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with a repo, to which the client of this process is led."""
    with LoopbackHub(tmp_path / "hub", new_port=True) as hub:
        hubs.lead_here(hub, monkeypatch)
        hub.create(hubs.REPO)
        yield hub


@pytest.fixture
def storage(hub) -> XetStorage:
    """The storage of the repo, where a second without a byte is too long."""
    return XetStorage(hubs.REPO, 1.0)


def weights(path: Path, size: int, seed: int = 0) -> Path:
    """A file of float32 numbers, as the client meets them."""
    path.write_bytes(np.random.default_rng(seed).standard_normal(size // 4).astype("f4").tobytes())
    return path


def stored(hub: LoopbackHub, path: Path) -> RemoteFile:
    digest = sha256(path.read_bytes()).hexdigest()
    name = hub.xet.hash_of(digest)
    assert name is not None
    return RemoteFile(path.stat().st_size, digest, name)


def test_what_is_uploaded_comes_back_byte_for_byte(hub, storage, tmp_path):
    files = [weights(tmp_path / f"{seed}", 1_000_000 + 4 * seed, seed) for seed in range(3)]
    uploaded, sent = storage.upload(files, "main")
    digests = [one.sha256 for one in uploaded]
    assert uploaded == [stored(hub, path) for path in files]
    assert digests == [sha256(path.read_bytes()).hexdigest() for path in files]
    assert 0.8 < sent.bytes_sent / hub.xet.stored_bytes() < 1.2
    repo = hub.repo(hubs.REPO)
    assert [repo.contents.size_of_large(digest) for digest in digests] == [
        path.stat().st_size for path in files
    ]
    back = {tmp_path / "back" / path.name: stored(hub, path) for path in files}
    storage.download(back, "main")
    assert [path.read_bytes() for path in back] == [path.read_bytes() for path in files]


def test_what_the_storage_has_is_not_sent_again(hub, storage, tmp_path):
    file = weights(tmp_path / "file", 1_000_000)
    first = storage.upload([file], "main")[1]
    again = storage.upload([file], "main")[1]
    with file.open("ab") as opened:  # only the end of a file that grows is new
        opened.write(weights(tmp_path / "more", 40_000, 1).read_bytes())
    grown = storage.upload([file], "main")[1]
    assert first.bytes_sent > 500_000
    assert again.bytes_sent < 5_000
    assert grown.bytes_sent < 300_000
    assert hub.count("xorb") == 2


@pytest.mark.parametrize("endpoint", ["xorb", "shard"])
def test_an_upload_that_moves_no_byte_ends(hub, storage, tmp_path, endpoint):
    hub.fault(endpoint, "hang")
    file, begun = weights(tmp_path / "file", 400_000), time.monotonic()
    with pytest.raises(HubUnreachable, match="no byte has moved to or from the Hub for 1 second"):
        storage.upload([file], "main")
    assert time.monotonic() - begun < 60  # huggingface_hub would wait for 300 seconds
    storage.upload([file], "main")


def test_a_download_that_moves_no_byte_ends(hub, storage, tmp_path):
    file = weights(tmp_path / "file", 400_000)
    storage.upload([file], "main")
    hub.fault("xorb-get", "hang")
    with pytest.raises(HubUnreachable, match="no byte has moved"):
        storage.download({tmp_path / "back": stored(hub, file)}, "main")


@pytest.mark.thorough
def test_a_slow_upload_that_progresses_is_left_alone(hub, tmp_path):
    hub.bytes_per_second, hub.xet_token_seconds = 2_500_000, 3
    storage, begun = XetStorage(hubs.REPO, 6.0), time.monotonic()  # the system buffers some MB
    storage.upload([weights(tmp_path / "file", 20_000_000)], "main")
    assert time.monotonic() - begun > 6.5  # for one request, in which the storage says nothing
    assert hub.count("xet-write-token") >= 2


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (400, HubRefused, "storage refuses (HTTP 400)"),
        (401, HubUnreachable, "storage answers HTTP 401"),  # the next upload has another token
        (403, HubRefused, "storage refuses (HTTP 403)"),
        (413, HubRefused, "storage refuses (HTTP 413)"),
        (429, HubUnreachable, "storage answers HTTP 429"),
        (500, HubUnreachable, "storage answers HTTP 500"),
        (507, HubUnreachable, "storage answers HTTP 507"),
    ],
)
def test_each_answer_of_the_storage_has_a_kind(hub, tmp_path, status, kind, message):
    hub.fault("xorb", "status", status=status, times=None)
    with pytest.raises(kind) as raised:
        XetStorage(hubs.REPO, 30.0).upload([weights(tmp_path / "file", 100_000)], "main")
    assert message in str(raised.value)
    assert hub.doors.address("blobs") not in str(raised.value)


def test_a_repo_that_is_gone_is_no_server_without_xet(hub, storage, tmp_path):
    hub.delete(hubs.REPO)
    with pytest.raises(HubRefused, match="there is no repo"):
        storage.upload([weights(tmp_path / "file", 100_000)], "main")
    hub.deviations = Deviations(no_xet=True)
    with pytest.raises(NoXet, match="HTTP 404"):
        storage.upload([weights(tmp_path / "file", 100_000)], "main")


def test_a_storage_that_is_a_folder_of_this_machine_is_refused(hub, storage, tmp_path, monkeypatch):
    monkeypatch.setattr(hub.doors, "address", lambda origin: f"local://{tmp_path}/cas")
    with pytest.raises(HubRefused, match=r"Xet storage of .*, which is not a URL"):
        storage.upload([weights(tmp_path / "file", 100_000)], "main")
    assert not (tmp_path / "cas").exists()


def test_errors_of_the_disk_are_none_of_the_hub(hub, storage, tmp_path):
    with pytest.raises(FileNotFoundError):
        storage.upload([tmp_path / "none"], "main")
    file = weights(tmp_path / "file", 400_000)
    storage.upload([file], "main")
    with pytest.raises(OSError, match="No space left on device"):
        storage.download({Path("/dev/full"): stored(hub, file)}, "main")


def test_without_hf_xet_there_is_no_xet(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    assert xet.is_available()
    monkeypatch.setattr(xet, "find_spec", lambda name: None)
    assert not xet.is_available()
    monkeypatch.undo()
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    assert not xet.is_available()


def test_its_threads_are_of_low_priority_and_take_no_signals(hub, storage, tmp_path):
    def signals() -> list[str]:
        lines = Path("/proc/self/status").read_text().splitlines()
        return [line for line in lines if line.startswith(("SigIgn", "SigCgt"))]

    def threads() -> dict[str, int]:
        """Niceness of each thread, by its number."""
        return {task: os.getpriority(os.PRIO_PROCESS, int(task)) for task in _tasks()}

    def stalled() -> None:
        with pytest.raises(HubUnreachable):
            storage.upload([weights(tmp_path / "file", 400_000)], "main")

    before, old, own = signals(), threads(), os.getpriority(os.PRIO_PROCESS, 0)
    fault = hub.fault("xorb", "hang")
    upload = threading.Thread(target=stalled)
    upload.start()
    hub.wait_for(lambda: fault.hits)
    names = {task: Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in _tasks()}
    found = threads()
    theirs = [task for task, name in names.items() if name.startswith("hf-xet") and task not in old]
    assert theirs
    assert {found[task] for task in theirs} == {min(19, own + xet.NICENESS)}
    assert found[str(threading.main_thread().native_id)] == own
    assert signals() == before
    upload.join()


def _tasks() -> list[str]:
    return os.listdir("/proc/self/task")


def test_a_cache_that_cannot_be_written_costs_xet_and_no_upload(small, tmp_path, hub):
    """As where a container's home is read-only."""
    place = tmp_path / "file"
    place.write_text("in the place of a folder")
    words = hubs.words(tmp_path / "run", "train.max_steps=10")
    result = runs.train(*small, *words, **hub.environment() | {"HF_XET_CACHE": str(place / "xet")})
    assert result.returncode == 0, result.stderr
    sentence = f"HF_XET_CACHE={place / 'xet'} cannot be written (Not a directory), so large files"
    assert result.stdout.count(sentence) == 1
    assert "timestamp" not in result.stderr  # a log of hf_xet's own
    assert hubs.step_of(hub) == 10
    assert hub.count("xorb") == 0
    hubs.assert_always_whole(hub)
