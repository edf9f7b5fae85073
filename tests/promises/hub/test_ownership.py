"""Nothing in a repo or a bucket that no run uploaded is overwritten or deleted."""

from __future__ import annotations

import json

import pytest

import hubs
import runs
from loopback_hub import LoopbackHub
from snapshot.errors import SnapshotError
from snapshot.start import RunStore, choose_start
from store.hub import Hub
from store.latest import Latest, latest_as_bytes

pytestmark = pytest.mark.filterwarnings(
    "ignore:Use 'content=:DeprecationWarning"  # huggingface_hub 2.4 calls httpx2 so
)
OURS = json.loads(latest_as_bytes(Latest("run", "a", 1, 7, "snapshots/step-00000007-a", "0" * 64)))
FOREIGN = {
    "another program's": {"version": 3},
    "of a newer version": {**OURS, "format_version": 3},
    "without a run": {**OURS, "run_id": ""},
    "damaged": None,
}
KINDS = [
    pytest.param(
        kind, marks=[] if kind in ("another program's", "damaged") else [pytest.mark.thorough]
    )
    for kind in FOREIGN
]


def somebodys(kind: str) -> dict[str, bytes]:
    """The files of a repo that no run uploaded, with a latest.json."""
    content = FOREIGN[kind]
    return {
        "latest.json": b'{"run_id": ' if content is None else json.dumps(content).encode(),
        "model.safetensors": b"somebody's",
        "config.json": b"{}",
        "NOTES.md": b"mine",
    }


def assert_untouched(hub: LoopbackHub, files: dict[str, bytes], commits: int) -> None:
    repo = hub.repo(hubs.REPO)
    assert len(repo.every_head) == commits
    assert {path: repo.read(repo.head, path) for path in files} == files
    assert not hub.count("lfs-delete")


@pytest.mark.parametrize("kind", KINDS)
def test_a_foreign_latest_json_is_refused_however_a_run_starts(
    near_hub, repo, finished_run, tmp_path, kind
):
    near_hub.commit_files(hubs.REPO, files := somebodys(kind))
    for takeover in (False, True):
        own = RunStore(Hub(hubs.REPO, 5.0), private=True, takeover=takeover)
        for run_dir in (finished_run, tmp_path / "new"):
            with pytest.raises(SnapshotError, match=r"Name one that is new or empty"):
                choose_start(run_dir, "auto", own)
    # A run that could not reach the Hub at its start.
    uploads = hubs.uploader(unknown=True)
    uploads.offer(newest := runs.snapshot(finished_run, 30), hubs.card(newest))
    assert not uploads.flush(300)
    assert "no run of this project" in " ".join(uploads.messages())
    assert_untouched(near_hub, files, commits=2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_latest_json_that_changes_pauses_the_uploads(near_hub, repo, finished_run, kind):
    uploads = hubs.uploader()
    first, second = (runs.snapshot(finished_run, step) for step in (10, 20))
    hubs.upload_each(uploads, first)
    sound = {"latest.json": repo.read("main", "latest.json")}
    near_hub.commit_files(hubs.REPO, files := somebodys(kind))
    uploads.offer(second, hubs.card(second))
    assert not uploads.flush(30)
    (message,) = uploads.messages()
    assert "uploads wait: hub.repo_id=me/run cannot be used: latest.json of me/run" in message
    assert "restore that file" in message
    assert_untouched(near_hub, files, commits=3)
    near_hub.commit_files(hubs.REPO, sound)
    uploads.offer(second, hubs.card(second))
    near_hub.wait_for(lambda: hubs.step_of(near_hub) == 20)


def test_files_that_come_during_the_first_upload_are_not_overwritten(
    near_hub, repo, finished_run, monkeypatch
):
    files = {
        path: content for path, content in somebodys("damaged").items() if "latest" not in path
    }
    commit = Hub._commit

    def commit_late(*arguments):
        """Another program's commit comes between contents and commit of an upload."""
        monkeypatch.setattr(Hub, "_commit", commit)
        near_hub.commit_files(hubs.REPO, files)
        return commit(*arguments)

    monkeypatch.setattr(Hub, "_commit", commit_late)
    uploads = hubs.uploader()
    uploads.offer(newest := runs.snapshot(finished_run, 30), hubs.card(newest))
    assert not uploads.flush(30)
    assert "me/run holds NOTES.md, which no run" in " ".join(uploads.messages())
    assert_untouched(near_hub, files, commits=2)


def test_the_advice_for_a_repo_with_a_damaged_latest_json_helps(near_hub, finished_run, tmp_path):
    hubs.seed(near_hub, runs.snapshot(finished_run, 20), runs.snapshot(finished_run, 30))
    sound = near_hub.repo(hubs.REPO).read("main", "latest.json")
    near_hub.commit_files(hubs.REPO, {"latest.json": b"{"})
    with pytest.raises(SnapshotError) as refused:
        choose_start(tmp_path / "lost", "auto", hubs.store())
    assert "snapshot.resume=hf://me/run, another run.name and a new store" in str(refused.value)
    new = choose_start(tmp_path / "new", "hf://me/run", hubs.store(repo_id="me/new"))
    assert new.state.step == 30
    near_hub.commit_files(hubs.REPO, {"latest.json": sound})
    assert choose_start(tmp_path / "lost", "auto", hubs.store()).state.step == 30
