"""What a name means, wherever one is given: on this disk, in a repo, in a store of files."""

from __future__ import annotations

import pytest
from huggingface_hub import constants

import families
import hubs
import runs
from snapshot.base import open_base
from snapshot.disk.folder import manifest_sha256
from snapshot.errors import SnapshotError
from snapshot.named_model import find_model
from snapshot.source import find
from snapshot.start import choose_start
from store.errors import StoreRefused, StoreUnreachable
from store.kinds import open_store

OLDER, NEWEST = 10, 30


@pytest.fixture(params=["disk", "repo", "files"])
def names(request, near_hub, finished_run, tmp_path, monkeypatch):
    """The name of a run, and that of an older snapshot of it."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    snapshots = [runs.snapshot(finished_run, step) for step in (OLDER, NEWEST)]
    if request.param == "disk":
        return str(finished_run), str(snapshots[0])
    store = open_store("hf://me/run" if request.param == "repo" else f"file://{tmp_path}/s", 5.0)
    hubs.upload(store, *snapshots)
    name = "me/run" if request.param == "repo" else store.url
    return name, f"{name}@{hubs.folder_of(snapshots[0])}"


def test_a_name_means_the_same_to_every_command(names, finished_run, tmp_path):
    """snapshot.resume, sample.py and evaluate.py, and model.pretrained."""
    for name, step in zip(names, (NEWEST, OLDER), strict=True):
        there = runs.snapshot(finished_run, step)
        start = choose_start(tmp_path / f"run-{step}", name)
        assert manifest_sha256(start.folder) == manifest_sha256(there)
        named = find_model(name)
        assert named.state.step == step
        assert not list(named.folder.glob("optimizer*")) or named.folder == there
        weights = (named.folder / "model.safetensors").read_bytes()
        assert weights == (there / "model.safetensors").read_bytes()
        base = open_base("model.pretrained", name, 5.0)
        assert (base.fetch_weights() / "model.safetensors").read_bytes() == weights
        again = open_base(
            "model.pretrained", base.place or base.name, 5.0
        )  # as another machine opens it
        assert again.folder == base.folder


def test_a_model_that_was_replaced_in_a_store_of_files_is_read_anew(tmp_path, monkeypatch):
    """Without commits, nothing but its content tells."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    model = tmp_path / "model"
    for deviation in (0.02, 0.05):
        families.make("llama", model, initializer_range=deviation)
        fetched = open_base("model.pretrained", f"file://{model}", 5.0).fetch_weights()
        weights = "model.safetensors"
        assert (fetched / weights).read_bytes() == (model / weights).read_bytes()


@pytest.mark.parametrize("name", ["out", "a/b/c", "/none/at/all"])
def test_a_name_of_nothing_is_one_sentence(near_hub, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = len(near_hub.requests)
    with pytest.raises(SnapshotError, match="neither a folder that exists nor a repo"):
        find(name)
    assert len(near_hub.requests) == asked


def test_a_misspelled_path_is_not_asked_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(SnapshotError, match=r"there is no out/python-dcos.*the Hub is not asked"):
        choose_start(tmp_path / "run", "out/python-dcos")


@pytest.mark.parametrize(
    ("fault", "kind"), [(StoreUnreachable, StoreUnreachable), (StoreRefused, SnapshotError)]
)
def test_a_repo_that_cannot_be_reached_is_nobodys_mistake(tmp_path, monkeypatch, fault, kind):
    def read_store(store, revision):
        raise fault("the Hub did not answer in time")

    monkeypatch.setattr("snapshot.source.read_store", read_store)
    monkeypatch.setattr("common.retries.BRIEF_DELAY_SECONDS", 0.0)
    with pytest.raises(kind, match=r"snapshot\.resume=me/other: the Hub did not answer in time\. "):
        choose_start(tmp_path / "run", "me/other")
