"""The loopback Hub is as strict as the Hub: what it refuses, and as what the client knows that."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import build_hf_headers, get_session

import hubs
import loopback_hub
from loopback_hub import LoopbackHub

REPO = "me/run"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with LoopbackHub(use_xet=False, new_port=True) as hub:
        hubs.lead_here(hub, monkeypatch)
        hub.create(REPO)
        yield hub


def commit(repo: str = REPO, path: str = "a", content: bytes = b"x", **more) -> str:
    add = [CommitOperationAdd(path, content)]
    return HfApi().create_commit(repo, add, commit_message="m", **more).oid


def refused(request) -> HfHubHTTPError:
    """What the client raises."""
    with pytest.raises(HfHubHTTPError) as caught:
        request()
    return caught.value


def status_of(error: HfHubHTTPError) -> int:
    return error.response.status_code


def test_a_stale_parent_is_refused_and_of_two_commits_one_wins(hub):
    first = hub.repo(REPO).head
    second = commit(parent_commit=first)
    assert status_of(refused(lambda: commit(path="b", parent_commit=first))) == 412
    with ThreadPoolExecutor(4) as pool:
        race = [pool.submit(commit, path=str(n), parent_commit=second) for n in range(4)]
    assert len([one for one in race if one.exception() is None]) == 1
    assert len(hub.repo(REPO).every_head) == 3


def test_what_is_not_whole_is_not_committed(hub):
    head = hub.repo(REPO).head
    header = '{"key": "header", "value": {"summary": "m"}}'
    good = '{"key": "file", "value": {"path": "a", "content": "YQ==", "encoding": "base64"}}'
    bad = [
        good.replace('"a"', '"../a"'),
        good.replace("YQ==", "Y"),
        good.replace('"a"', '"a.safetensors"'),
        good.replace("file", "file2"),
        good[:-2],
        '{"key": "lfsFile", "value": {"path": "a", "algo": "sha256", "oid": "none", "size": 1}}',
    ]
    url = f"{hub.endpoint}/api/models/{REPO}/commit/main"
    for lines in ([good], *([header, good, one] for one in bad)):
        content = "\n".join(lines).encode()
        answer = get_session().post(url, headers=build_hf_headers(), content=content)
        assert answer.status_code == 400, lines
    assert hub.repo(REPO).head == head


def test_it_runs_in_the_foreground():
    words = [sys.executable, loopback_hub.__file__, "--latency", "0", "0.01"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        lines = dict(process.stdout.readline().strip().split("=") for _ in range(2))
        request = urllib.request.Request(
            f"{lines['HF_ENDPOINT']}/api/whoami-v2",
            headers={"Authorization": f"Bearer {lines['HF_TOKEN']}"},
        )
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(30) == 0
        finally:
            process.kill()
