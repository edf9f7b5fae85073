"""What the tests of the Hub share: a hub, runs that use it, and what must hold of every commit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from huggingface_hub import constants, get_token

from loopback_hub import LoopbackHub
from loopback_store import Repo

REPO = "me/run"
WITHOUT_OPTIMIZER = ("config.json", "model.safetensors", "tokenizer.json")


def words(run_dir: Path, *more: str) -> list[str]:
    """The overrides of a run that uploads to the hub as often as it can."""
    return [
        f"hub.repo_id={REPO}",
        f"run.dir={run_dir}",
        "hub.min_interval_seconds=0",
        "hub.timeout_seconds=5",
        "hub.flush_seconds=60",
        *more,
    ]


def lead_here(hub: LoopbackHub, monkeypatch) -> None:
    """Lead the client in this process to the hub. What it read when it was imported is replaced."""
    for name, value in hub.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", not hub.deviations.no_xet)
    assert get_token() == hub.default_token


def latest(hub: LoopbackHub, repo_id: str = REPO) -> dict:
    """`latest.json` at the head; empty where there is none."""
    repo = hub.repo(repo_id)
    if repo is None or "latest.json" not in repo.files(repo.head):
        return {}
    return json.loads(repo.read(repo.head, "latest.json"))


def step_of(hub: LoopbackHub, repo_id: str = REPO) -> int:
    """The newest step on the hub; 0 where there is none."""
    return latest(hub, repo_id).get("step", 0)


def steps_at_head(repo: Repo) -> list[int]:
    """The steps of the snapshots that the head holds."""
    folders = {
        path.split("/")[1] for path in repo.files(repo.head) if path.startswith("snapshots/")
    }
    return sorted(int(folder.removeprefix("step-")) for folder in folders)


def assert_always_whole(hub: LoopbackHub, repo_id: str = REPO) -> None:
    """Every commit that was ever the head of main holds whole snapshots and no other."""
    repo = hub.repo(repo_id)
    assert repo is not None
    for commit in repo.every_head:
        _assert_whole(repo, commit)


def _assert_whole(repo: Repo, commit: str) -> None:
    files = repo.files(commit)
    folders = {path.rpartition("/")[0] for path in files if path.startswith("snapshots/")}
    for folder in folders:
        inside = {
            path.rpartition("/")[2]: entry
            for path, entry in files.items()
            if path.startswith(f"{folder}/")
        }
        manifest = json.loads(repo.read(commit, f"{folder}/manifest.json"))
        listed = {entry["path"]: entry for entry in manifest["files"]}
        assert set(listed) | {"manifest.json"} == set(inside)
        for name, entry in listed.items():
            assert entry["size"] == inside[name].size
            assert entry["sha256"] == inside[name].sha256
    if "latest.json" in files:
        newest = json.loads(repo.read(commit, "latest.json"))
        content = repo.read(commit, f"{newest['folder']}/manifest.json")
        assert hashlib.sha256(content).hexdigest() == newest["manifest_sha256"]
        for name in WITHOUT_OPTIMIZER:  # what from_pretrained finds is the newest snapshot's
            assert files[name].sha256 == files[f"{newest['folder']}/{name}"].sha256
    else:
        assert not folders
