"""The store at servers that differ from huggingface.co: what each lacks costs no snapshot."""

from __future__ import annotations

import time

import pytest
from huggingface_hub import constants

import hubs
import runs
from loopback_hub import ALL, Deviations, LoopbackHub
from snapshot.disk.folder import manifest_sha256
from snapshot.disk.state import read_state
from snapshot.errors import SnapshotError
from snapshot.source import find
from snapshot.start import Start, choose_start, newest_of_disk_and_store
from store.attempt import Card
from store.errors import StoreError, StoreUnreachable
from store.fetch import INFERENCE, fetch, fetch_newest, read_store
from store.hub import Hub
from store.store import Addition

pytestmark = pytest.mark.filterwarnings(
    "ignore:Use 'content=:DeprecationWarning"  # huggingface_hub 2.4 calls httpx2 so
)


@pytest.fixture
def hub(tmp_path, request, monkeypatch):
    """A hub with the test's deviations, to which the client of this process is led."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    deviations, use_xet = request.param, request.param != ALL
    with LoopbackHub(
        tmp_path / "hub", deviations=deviations, use_xet=use_xet, new_port=True
    ) as hub:
        hubs.lead_here(hub, monkeypatch)
        yield hub


NAMES = [name for name in Deviations.__dataclass_fields__ if name != "private_ignored"]
ONE_EACH = [pytest.param(Deviations(**{name: True}), id=name) for name in NAMES]


@pytest.mark.parametrize("hub", [*ONE_EACH, pytest.param(ALL, id="all")], indirect=True)
def test_a_run_is_uploaded_to_and_fetched_from_a_server_with(hub, finished_run, tmp_path):
    begun = newest_of_disk_and_store(hubs.store(), Start(None, None, ""), tmp_path / "run")
    assert begun.contents is not None
    uploads = hubs.uploader()
    hubs.upload_each(uploads, *(runs.snapshot(finished_run, step) for step in (10, 20, 30)))
    assert hubs.steps_at_head(hub.repo(hubs.REPO)) == [10, 20, 30]
    hubs.assert_always_whole(hub)
    remote = read_store(Hub(hubs.REPO, 5.0))
    assert remote.latest.step == 30
    assert (
        manifest_sha256(fetch(remote, remote.folders()[0], tmp_path))
        == remote.latest.manifest_sha256
    )
    assert (
        fetch_newest(read_store(Hub(hubs.REPO, 5.0)), wanted=INFERENCE).path.name
        == "step-00000030-attempt"
    )


@pytest.mark.parametrize("hub", [Deviations()], indirect=True)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "manifest.json"])
def test_a_damaged_file_in_the_cache_is_downloaded_again(hub, finished_run, name):
    hubs.put(hub, runs.snapshot(finished_run, 30), 30)
    for damage in (
        lambda content: content[: len(content) // 2],
        lambda content: content[:-2] + b"!}",
    ):
        file = fetch_newest(read_store(Hub(hubs.REPO)), wanted=INFERENCE).path / name
        sound = file.read_bytes()
        file.resolve().write_bytes(damage(sound))
        assert fetch_newest(read_store(Hub(hubs.REPO)), wanted=INFERENCE).path / name == file
        assert file.read_bytes() == sound


@pytest.mark.parametrize(
    "hub",
    [
        pytest.param(Deviations(), id="huggingface.co"),
        pytest.param(Deviations(parent_ignored=True), id="parent_ignored"),
        pytest.param(Deviations(long_ids=True), id="long_ids"),
        pytest.param(ALL, id="all"),
    ],
    indirect=True,
)
def test_a_takeover_during_an_upload_ends_it_before_its_commit(hub, finished_run):
    hub.create(hubs.REPO)
    newest = runs.snapshot(finished_run, 30)
    between = hubs.Interrupted(
        hubs.REPO, lambda: hubs.put(hub, newest, 40, attempt="another", generation=2)
    )
    uploads = hubs.uploader(hub=between)
    uploads.offer(newest, Card("# 30\n"))
    assert uploads.flush(300)
    told = "another start of this run uploads to me/run now"
    assert len([message for message in uploads.messages() if message.startswith(told)]) == 1
    assert uploads.status().off
    assert hubs.latest(hub)["attempt_id"] == "another"
    assert hub.count("commit") == 0


@pytest.mark.parametrize("hub", [Deviations()], indirect=True)
def test_a_server_without_xet_is_named_once_with_the_remedy(hub, finished_run, monkeypatch):
    hub.create(hubs.REPO)
    hub.fault("xet-write-token", "status", status=404, times=None)
    uploads = hubs.uploader()
    for step in (20, 30):
        uploads.offer(runs.snapshot(finished_run, step), Card(f"# {step}\n"))
        assert not uploads.flush(30)
    (message,) = uploads.messages()
    assert f"{hub.endpoint} has no Xet storage for large files (HTTP 404)" in message
    assert "Set HF_HUB_DISABLE_XET=1 in the environment" in message
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    uploads = hubs.uploader()
    hubs.upload_each(uploads, runs.snapshot(finished_run, 30))


@pytest.mark.parametrize("status", [403, 503])
@pytest.mark.parametrize("hub", [Deviations()], indirect=True)
def test_a_server_that_is_down_is_not_taken_for_one_without_xet(hub, finished_run, status):
    hub.create(hubs.REPO)
    hub.fault("xet-write-token", "status", status=status, times=None)
    weights = runs.snapshot(finished_run, 20) / "model.safetensors"
    store = Hub(hubs.REPO)
    with pytest.raises(StoreError, match=f"storage .*HTTP {status}"):
        store.publish(store.head(), {weights.name: Addition(weights)}, (), "")


@pytest.mark.parametrize("hub", [Deviations(no_deletion=True)], indirect=True)
def test_what_a_server_lacks_is_said_once_with_a_remedy(hub, finished_run):
    hub.create(hubs.REPO)
    uploads = hubs.uploader(keep=1)
    hubs.upload_each(uploads, *(runs.snapshot(finished_run, step) for step in (10, 20, 30)))
    (deletion,) = uploads.messages()
    assert "still use storage of me/run: the server does not do what the Hub does (HTTP" in deletion
    assert "HfApi().super_squash_history(repo)" in deletion
    assert "Check hub.repo_id" not in deletion


@pytest.mark.parametrize("hub", [Deviations(private_ignored=True)], indirect=True)
def test_a_server_that_makes_a_private_repo_public_is_named(hub, tmp_path):
    with pytest.raises(SnapshotError) as caught:
        choose_start(tmp_path / "run", "auto", hubs.store())
    said = str(caught.value)
    assert "is a public repo, and hub.private=true. Nothing was uploaded." in said
    assert "hub.private=false (a server without private repos needs that)" in said
    assert choose_start(tmp_path / "run", "auto", hubs.store(private=False)).contents is not None


@pytest.mark.parametrize("hub", [Deviations()], indirect=True)
def test_a_fault_is_one_warning_and_a_word_in_the_progress(hub, finished_run, monkeypatch):
    monkeypatch.setattr("store.uploader.FIRST_DELAY_SECONDS", 0.01)
    hub.create(hubs.REPO)
    fault = hub.fault("commit", "status", status=500, times=None, message="the disk is on fire")
    uploads = hubs.uploader()
    uploads.offer(runs.snapshot(finished_run, 30), Card("# 30\n"))
    hub.wait_for(lambda: fault.hits >= 5)
    assert uploads.status().as_words() == "hub has none yet, last error: HTTP 500"
    assert "the disk is on fire" in uploads.status().failure_text
    (message,) = uploads.messages()
    assert "the Hub cannot be reached (HTTP 500: the disk is on fire)" in message
    hub.clear_faults()
    assert uploads.flush(300)
    assert uploads.status().as_words().startswith("hub at step 30, 0:")
    assert uploads.messages() == []


@pytest.mark.parametrize("hub", [Deviations()], indirect=True)
def test_every_request_of_a_start_ends_at_the_run_s_own_timeout(hub, finished_run, monkeypatch):
    monkeypatch.setattr("common.retries.BRIEF_DELAY_SECONDS", 0.0)
    newest = runs.snapshot(finished_run, 30)
    hubs.put(hub, newest, 30, run=read_state(newest).run_id)
    found = newest_of_disk_and_store(
        hubs.store(4.5), Start(None, None, ""), finished_run.parent / "other"
    )
    same = find(found.remote, 4.5)  # what another machine is told
    assert same.contents.store.timeout == 4.5
    fetched = same.fetch(finished_run.parent / "third").path
    assert manifest_sha256(fetched) == manifest_sha256(newest)
    fault = hub.fault("info", "hang", times=None)
    started = time.monotonic()
    with pytest.raises(StoreUnreachable, match="no answer in time"):
        choose_start(finished_run.parent / "fourth", hubs.REPO, timeout=0.5)
    assert time.monotonic() - started < 30  # not the 60 of a Hub that nobody told
    assert fault.hits == 1


IN_THE_DOCS = {
    "whoami": "`GET /api/whoami-v2`",
    "create": "`POST /api/repos/create`",
    "info": "`GET /api/models/{id}/revision/{revision}`",
    "tree": "`GET /api/models/{id}/tree/{commit}?recursive=true`",
    "resolve-head": "`GET` and `HEAD /{id}/resolve/{commit}/{path}`",
    "resolve-get": "`GET` and `HEAD /{id}/resolve/{commit}/{path}`",
    "blob-get": "downloads",
    "preupload": "`POST /api/models/{id}/preupload/{branch}`",
    "batch": "`POST /{id}.git/info/lfs/objects/batch`",
    "put": "`PUT`",
    "verify": "`verify` address",
    "validate-yaml": "`POST /api/validate-yaml`",
    "commit": "`POST /api/models/{id}/commit/{branch}`",
    "refs": "`GET /api/models/{id}/refs`",
    "tag": "`POST /api/models/{id}/tag/{name}`",
    "lfs-delete": "`POST /api/models/{id}/lfs-files/batch`",
}


@pytest.mark.parametrize("hub", [Deviations()], indirect=True)
def test_what_is_asked_of_a_server_stands_in_the_docs(hub, finished_run, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    newest_of_disk_and_store(hubs.store(), Start(None, None, ""), tmp_path / "run")
    uploads = hubs.uploader(keep=1, milestone_every=20)
    hubs.upload_each(uploads, *(runs.snapshot(finished_run, step) for step in (10, 20, 30)))
    remote = read_store(Hub(hubs.REPO, 5.0))
    fetch(remote, remote.folders()[0], tmp_path)
    asked = {one.endpoint for one in hub.requests}
    assert asked == set(IN_THE_DOCS)
    docs = (runs.ROOT / "docs" / "hub.md").read_text()
    for endpoint in asked:
        assert IN_THE_DOCS[endpoint] in docs, endpoint
