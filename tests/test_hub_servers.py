"""The store at servers that differ from huggingface.co: what each lacks costs no snapshot."""

from __future__ import annotations

import pytest
from huggingface_hub import constants, scan_cache_dir

import hubs
import runs
from loopback_deviations import ALL, Deviations
from loopback_hub import LoopbackHub
from snapshot.fetch import fetch, look_at, newest_for_sampling
from snapshot.files import identity
from snapshot.hub import Hub
from snapshot.latest import Latest, latest_as_bytes
from snapshot.publish import Card, Policy
from snapshot.store import Store, newest_of_both
from snapshot.upload import Uploader

pytestmark = pytest.mark.filterwarnings(
    "ignore:Use 'content=:DeprecationWarning"  # huggingface_hub 2.4 calls httpx2 so
)


@pytest.fixture
def hub(tmp_path, request, monkeypatch):
    """A hub with the test's deviations, to which the client of this process is led."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with LoopbackHub(tmp_path / "hub", deviations=request.param) as hub:
        hubs.lead_here(hub, monkeypatch)
        yield hub


def store() -> Store:
    return Store(Hub(hubs.REPO, 5.0), private=True, takeover=False)


def uploader(hub: LoopbackHub, seen=None, **changes) -> Uploader:
    policy = {"keep": 3, "min_interval": 0.0, "squash_every": 100, "private": True}
    names = {"run_id": "run", "attempt_id": "attempt", "ended": ()}
    for name in list(changes):
        if name in names:
            names[name] = changes.pop(name)
    own = Policy(**{**policy, "takeover": False, **changes})
    return Uploader(Hub(hubs.REPO, 5.0), own, seen=seen, **names)


NAMES = [name for name in Deviations.__dataclass_fields__ if name != "no_squash"]
ONE_EACH = [pytest.param(Deviations(**{name: True}), id=name) for name in NAMES]


@pytest.mark.parametrize("hub", [*ONE_EACH, pytest.param(ALL, id="all")], indirect=True)
def test_a_run_is_uploaded_to_and_fetched_from_a_server_with(hub, finished_run, tmp_path):
    begun = newest_of_both(store(), None, None, tmp_path / "run", ())
    assert begun.hub_is_known
    uploads = uploader(hub)
    for step in (10, 20, 30):
        uploads.offer(runs.snapshot(finished_run, step), Card(f"# step {step}\n"))
        assert uploads.flush(30), uploads.status()
    assert hubs.steps_at_head(hub.repo(hubs.REPO)) == [10, 20, 30]
    hubs.assert_always_whole(hub)
    remote = look_at(Hub(hubs.REPO, 5.0))
    assert remote.latest.step == 30
    assert identity(fetch(remote, remote.folders()[0], tmp_path)) == remote.latest.manifest_sha256
    assert newest_for_sampling(Hub(hubs.REPO, 5.0), "main").name == "step-00000030"


def put(hub: LoopbackHub, snapshot, *steps: int) -> None:
    """Commit a snapshot as those steps, a commit each, with no client."""
    if hub.repo(hubs.REPO) is None:
        hub.create(hubs.REPO)
    for step in steps:
        place = f"snapshots/step-{step:08d}"
        files = {f"{place}/{path.name}": path.read_bytes() for path in snapshot.iterdir()}
        described = Latest("run", "attempt", step, place, identity(snapshot), step)
        hub.commit_files(hubs.REPO, {**files, "latest.json": latest_as_bytes(described)})


@pytest.mark.parametrize("hub", [Deviations()], indirect=True)
def test_the_weights_of_several_commits_are_kept_once_where_hf_cache_finds_them(
    hub, finished_run, tmp_path
):
    folders = []
    for step in (10, 20):
        put(hub, runs.snapshot(finished_run, 30), step)
        folders.append(newest_for_sampling(Hub(hubs.REPO), "main"))
    assert [folder.name for folder in folders] == ["step-00000010", "step-00000020"]
    weights = {(folder / "model.safetensors").resolve() for folder in folders}
    assert len(weights) == 1
    (kept,) = scan_cache_dir(tmp_path / "cache").repos
    assert kept.repo_id == hubs.REPO
    assert len(kept.revisions) == 2
    size = sum(path.stat().st_size for path in runs.snapshot(finished_run, 30).iterdir())
    assert kept.size_on_disk < size


@pytest.mark.parametrize("hub", [Deviations()], indirect=True)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "manifest.json"])
def test_a_file_that_was_damaged_in_the_cache_is_downloaded_again(hub, finished_run, name):
    put(hub, runs.snapshot(finished_run, 30), 30)
    for damage in (
        lambda content: content[: len(content) // 2],
        lambda content: content[:-2] + b"!}",
    ):
        file = newest_for_sampling(Hub(hubs.REPO), "main") / name
        sound = file.read_bytes()
        file.resolve().write_bytes(damage(sound))
        assert newest_for_sampling(Hub(hubs.REPO), "main") / name == file
        assert file.read_bytes() == sound


@pytest.mark.parametrize("hub", [Deviations()], indirect=True)
def test_what_is_damaged_on_the_hub_itself_is_an_error_and_the_one_before_is_taken(
    hub, finished_run
):
    put(hub, runs.snapshot(finished_run, 30), 10, 20)
    path = "snapshots/step-00000020/config.json"
    repo = hub.repo(hubs.REPO)
    hub.commit_files(hubs.REPO, {path: repo.read(repo.head, path).replace(b"32", b"23")})
    assert newest_for_sampling(Hub(hubs.REPO), "main").name == "step-00000010"
