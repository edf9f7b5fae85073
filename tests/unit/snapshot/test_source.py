"""What a name means, wherever one is given: on this disk, in a repo, in a store of files."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import constants

import families
import hubs
import runs
from model.lora import Lora
from snapshot.disk.folder import manifest_sha256
from snapshot.disk.load import digest_of
from snapshot.disk.model import Adapters
from snapshot.errors import SnapshotError
from snapshot.named_model import find_model, open_base, open_base_of
from snapshot.source import find
from snapshot.start import choose_start
from store.errors import StoreRefused, StoreUnreachable
from store.kinds import open_store

OLDER, NEWEST = 10, 30
LORA = Lora(4, 8, ("q_proj",), 0.0)


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
        assert start.state.origin == manifest_sha256(start.folder) == manifest_sha256(there)
        named = find_model(name)
        assert named.state.step == step
        assert named.state.run_id != start.state.run_id
        assert not list(named.folder.glob("optimizer*")) or named.folder == there
        weights = (named.folder / "model.safetensors").read_bytes()
        assert weights == (there / "model.safetensors").read_bytes()
        base = open_base("model.pretrained", name, 5.0)
        assert (base.fetch_weights() / "model.safetensors").read_bytes() == weights
        elsewhere = open_base("model.pretrained", base.place or base.name, 5.0)
        assert elsewhere.folder == base.folder


def test_a_model_that_was_replaced_in_a_store_of_files_is_read_anew(tmp_path, monkeypatch):
    """Without commits, nothing but its content tells."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    model = tmp_path / "model"
    for deviation in (0.02, 0.05):
        families.make("llama", model, initializer_range=deviation)
        fetched = open_base("model.pretrained", f"file://{model}", 5.0).fetch_weights()
        weights = "model.safetensors"
        assert (fetched / weights).read_bytes() == (model / weights).read_bytes()


NAMED = {
    "me/base": "a folder of this disk",
    "hf://me/base@v1": "the repo",  # a tag may lead to any commit
    "hf://me/base@0000000": "the repo",
    "hf://me/base@1111111": "is not what is in",
    "me/base@snapshots/step-00000010": "is not what is in",
    "me/other": "is not what is in",
}
"""What the name of a base leads to, beside ./me/base, where the Hub's me/base is recorded."""


@pytest.mark.parametrize("name", NAMED)
def test_the_base_of_adapters_is_what_the_user_names(tmp_path, monkeypatch, name):
    def ask(*_: object, **__: object) -> None:
        raise SnapshotError("the repo")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("snapshot.named_model.find", ask)
    folder = families.make("llama", Path("me/base"))
    adapters = Adapters(LORA, "me/base", "0" * 40, transposed=False)
    open_named = partial(open_base_of, adapters, where=Path("snap"), timeout=5.0, named=name)
    if name == "me/base":
        assert open_named(digest_of(folder)).folder == folder
        with pytest.raises(SnapshotError, match=r"is not what is in me/base\."):
            open_named("0" * 64)
    else:
        with pytest.raises(SnapshotError, match=NAMED[name]):
            open_named(digest_of(folder))


@pytest.mark.parametrize("name", ["out", "a/b/c", "/none/at/all"])
def test_a_name_of_nothing_is_one_sentence(near_hub, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = len(near_hub.requests)
    with pytest.raises(SnapshotError, match="neither a folder that exists nor a repo"):
        find(name)
    assert len(near_hub.requests) == asked


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
