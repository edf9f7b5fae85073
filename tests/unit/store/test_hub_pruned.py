"""A reader whose snapshot is pruned while it downloads it reads the head again."""

from __future__ import annotations

import pytest

import hubs
import runs
from snapshot.__main__ import main
from snapshot.disk.state import read_state
from snapshot.errors import SnapshotError
from snapshot.named_model import find_model
from snapshot.start import RunStore, choose_start
from store.files import Disk
from store.hub import Hub
from store.store import Store

pytestmark = pytest.mark.filterwarnings(  # huggingface_hub 2.4 calls httpx2 so
    "ignore:Use 'content=:DeprecationWarning"
)


@pytest.fixture
def pruned_meanwhile(near_hub, finished_run, monkeypatch):
    """A function: for a store of one snapshot, the next one is uploaded while that is downloaded.

    It takes the store, how often that happens, and how many snapshots the run keeps.
    """

    def begin(store: Store, times: int = 1, keep: int = 1) -> None:
        store.create(private=True)
        snapshots = [runs.snapshot(finished_run, step) for step in (10, 20, 30)]
        run_id = read_state(snapshots[0]).run_id
        uploads = hubs.uploader(store, run_id=run_id, attempt_id="a" * 32, keep=keep)
        waiting = snapshots[1 : 1 + times]
        download = type(store).fetch

        def upload(snapshot) -> None:
            uploads.offer(snapshot, hubs.card(snapshot))
            assert uploads.flush(300), uploads.status()

        def download_late(self, head, paths, *rest):
            if waiting and "model.safetensors" in str(paths):
                upload(waiting.pop(0))
            return download(self, head, paths, *rest)

        upload(snapshots[0])
        monkeypatch.setattr(type(store), "fetch", download_late)

    return begin


def of_sample(tmp_path, store) -> int:
    return find_model(hubs.REPO).state.step


def of_verify(tmp_path, store) -> int:
    return 0 if main(["verify", hubs.REPO]) else 20


def of_own(tmp_path, store) -> int:
    start = choose_start(tmp_path / "empty", "auto", store)
    assert start.warnings == ()
    assert start.known_latest.step == start.state.step  # what its first upload may replace
    return start.state.step


def of_named(tmp_path, store) -> int:
    return choose_start(tmp_path / "new", store.store.url).state.step


@pytest.mark.parametrize(
    ("near_hub", "is_repo", "read"),
    [
        ("LFS", True, of_sample),
        ("LFS", True, of_verify),
        ("LFS", True, of_own),
        ("Xet", True, of_own),
        ("LFS", False, of_named),
    ],
    indirect=["near_hub"],
)
def test_a_pruned_snapshot_has_a_successor_to_download(
    near_hub, pruned_meanwhile, tmp_path, is_repo, read, capsys
):
    folder = Disk(f"file://{tmp_path}/shared", 5.0)
    store = Hub(hubs.REPO, 5.0) if is_repo else folder
    pruned_meanwhile(store)
    assert read(tmp_path, RunStore(store, private=True, takeover=False)) == 20
    if read is of_verify:
        assert f"{hubs.REPO}@" in capsys.readouterr().out


def test_a_commit_that_is_named_and_has_been_pruned(near_hub, pruned_meanwhile, tmp_path):
    pruned_meanwhile(Hub(hubs.REPO, 5.0))
    commit = near_hub.repo(hubs.REPO).head
    with pytest.raises(SnapshotError) as caught:
        find_model(f"{hubs.REPO}@{commit}")
    said = str(caught.value)
    assert said.startswith(f"none of the snapshots in {hubs.REPO}@{commit[:8]} is whole: ")
    assert "is gone (HTTP 404): that snapshot was pruned, or its content is lost" in said
    assert said.count(f"`python -m snapshot list {hubs.REPO}`") == 1


def test_verify_says_which_snapshots_it_has_looked_at(near_hub, finished_run, tmp_path, capsys):
    snapshots = [runs.snapshot(finished_run, step) for step in (10, 20, 30)]
    hubs.seed(near_hub, *snapshots)
    _, older, newest = map(hubs.folder_of, snapshots)
    head = near_hub.repo(hubs.REPO).head[:8]
    assert main(["verify", hubs.REPO]) == 0
    said = capsys.readouterr().out
    assert f"{hubs.REPO}@{head} {newest}: whole, " in said
    near_hub.commit_files(hubs.REPO, {f"{newest}/optimizer.safetensors": b"damaged"})
    assert main(["verify", hubs.REPO]) == 1
    said, errors = capsys.readouterr()
    assert errors.startswith(f"not whole: {newest} of me/run@")
    assert f" {older}: whole, " in said
    assert str(tmp_path.parent.parent) not in said + errors
