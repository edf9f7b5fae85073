"""What the tests of the Hub share: a hub, runs that use it, and what must hold of every commit.

Uploads and downloads need no training: `store` and `uploader` are what a run has of the Hub, in
this process, for a hub to which `lead_here` has led the client.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants, get_token
from huggingface_hub.utils._xet import abort_xet_session
from safetensors.torch import load_file, save_file

from loopback_hub import LoopbackHub
from loopback_store import Repo
from snapshot.disk.folder import (
    atomic_snapshot,
    folder_name,
    manifest_sha256,
    read_json,
    write_json,
)
from snapshot.disk.state import read_state
from snapshot.start import RunStore
from store.attempt import Best, Card, UploadTarget
from store.hub import Hub
from store.latest import Latest, latest_as_bytes, remote_folder
from store.store import Store
from store.uploader import Uploader

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
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", not hub.use_xet)
    abort_xet_session()  # it has read its settings
    assert get_token() == hub.default_token


def hurry(monkeypatch) -> None:
    """What fails is soon tried again."""
    monkeypatch.setattr("store.uploader.FIRST_DELAY_SECONDS", 0.1)
    monkeypatch.setattr("store.uploader.FLUSH_DELAY_SECONDS", 0.5)
    monkeypatch.setattr("common.retries.FIRST_DELAY_SECONDS", 0.1)
    monkeypatch.setattr("common.retries.BRIEF_DELAY_SECONDS", 0.2)


def store(timeout: float = 5.0, repo_id: str = REPO, private: bool = True) -> RunStore:
    """A run's own repo, as its start has it."""
    return RunStore(Hub(repo_id, timeout), private, takeover=False)


def uploader(
    hub: Store | None = None,
    *,
    run_id: str = "run",
    attempt_id: str = "attempt",
    seen: Latest | None = None,
    keep: int = 3,
    milestone_every: int | None = None,
    unknown: bool = False,
    private: bool = True,
    takeover: bool = False,
) -> Uploader:
    """The uploads of an attempt, as often as it can."""
    policy = (keep, private, takeover, 0.0, milestone_every)
    hub = hub or Hub(REPO, 5.0)
    return Uploader(UploadTarget(hub, run_id, attempt_id, *policy, seen, was_read=not unknown))


def card(folder: Path) -> Card:
    """A card for a snapshot, with something that stands for the curves."""
    return Card(f"# {folder.name}\n", b"\x89PNG of " + folder.name.encode())


def seed(hub: LoopbackHub, *snapshots: Path, repo_id: str = REPO) -> None:
    """Have those snapshots of a run on the hub, as that run would have uploaded them."""
    hub.create(repo_id)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # huggingface_hub 2.4 calls httpx2 so.
        warnings.filterwarnings("ignore", "Use 'content=", DeprecationWarning)
        lead_here(hub, patch)
        upload(Hub(repo_id, 5.0), *snapshots)
    assert step_of(hub, repo_id) == read_state(snapshots[-1]).step


def upload(store: Store, *snapshots: Path) -> None:
    """Have those snapshots of a run in a store, as that run would have uploaded them."""
    store.create(private=True)
    state = read_state(snapshots[0])
    uploads = uploader(store, run_id=state.run_id, attempt_id=state.attempt_id)
    upload_each(uploads, *snapshots)


def upload_each(uploads: Uploader, *folders: Path, best: Best | None = None) -> None:
    """Offer snapshots one after the other, each when the one before is uploaded."""
    for folder in folders:
        uploads.offer(folder, card(folder), best)
        assert uploads.flush(300), uploads.status()
        assert uploads.status().failure_text is None, uploads.status()


def publish(hub: LoopbackHub, repo_id: str, folder: Path) -> str:
    """Commit the files of a folder as a model repo that somebody else made; the commit."""
    hub.create(repo_id, private=False)
    return hub.commit_files(repo_id, {path.name: path.read_bytes() for path in folder.iterdir()})


def folder_of(snapshot: Path) -> str:
    """Where `seed` has put a snapshot."""
    return remote_folder(snapshot.name, read_state(snapshot).attempt_id)


def put(
    hub: LoopbackHub,
    snapshot: Path,
    *steps: int,
    run: str = "run",
    attempt: str = "attempt",
    generation: int = 1,
) -> None:
    """Commit a snapshot as those steps, a commit each, with no client."""
    if hub.repo(REPO) is None:
        hub.create(REPO)
    for step in steps:
        place = remote_folder(f"step-{step:08d}", attempt)
        files = {f"{place}/{path.name}": path.read_bytes() for path in snapshot.iterdir()}
        sha256 = manifest_sha256(snapshot)
        described = Latest(run, attempt, generation, step, place, sha256)
        hub.commit_files(REPO, {**files, "latest.json": latest_as_bytes(described)})


def latest(hub: LoopbackHub, repo_id: str = REPO) -> dict:
    """`latest.json` at the head; empty where there is none."""
    repo = hub.repo(repo_id)
    if repo is None or "latest.json" not in repo.files(repo.head):
        return {}
    return json.loads(repo.read(repo.head, "latest.json"))


def step_of(hub: LoopbackHub, repo_id: str = REPO) -> int:
    """The newest step on the hub; 0 where there is none."""
    return latest(hub, repo_id).get("step", 0)


def all_latest(hub: LoopbackHub) -> list[dict]:
    """`latest.json` of every head that had one."""
    repo = hub.repo(REPO)
    assert repo is not None
    heads = [commit for commit in repo.every_head if "latest.json" in repo.files(commit)]
    return [json.loads(repo.read(commit, "latest.json")) for commit in heads]


def steps_at_head(repo: Repo) -> list[int]:
    """The steps of the snapshots that the head holds."""
    folders = {
        path.split("/")[1] for path in repo.files(repo.head) if path.startswith("snapshots/")
    }
    return sorted(int(folder.split("-")[1]) for folder in folders)


def assert_always_whole(hub: LoopbackHub) -> None:
    """Every commit that was ever the head of main holds whole snapshots and no other."""
    repo = hub.repo(REPO)
    assert repo is not None
    for commit in repo.every_head:
        _assert_whole(repo, commit)


def _assert_whole(repo: Repo, commit: str) -> None:
    entries, read = repo.files(commit), partial(repo.read, commit)
    whole = assert_whole({path: (one.size, one.sha256) for path, one in entries.items()}, read)
    assert whole == {path.rpartition("/")[0] for path in entries if path.startswith("snapshots/")}
    if "latest.json" in entries:
        newest = json.loads(read("latest.json"))
        content = read(f"{newest['folder']}/manifest.json")
        assert hashlib.sha256(content).hexdigest() == newest["manifest_sha256"]
        for name in WITHOUT_OPTIMIZER:  # what from_pretrained finds is the newest snapshot's
            assert entries[name].sha256 == entries[f"{newest['folder']}/{name}"].sha256
    else:
        assert not whole


def assert_whole(files: dict[str, tuple[int, str]], read: Callable[[str], bytes]) -> set[str]:
    """A folder with a manifest has all files that this lists, and no other; those folders.

    `files` has the size and the SHA-256 of each.
    """
    whole = {path.rpartition("/")[0] for path in files if path.endswith("/manifest.json")}
    for folder in whole:
        listed = json.loads(read(f"{folder}/manifest.json"))["files"]
        inside = {path: one for path, one in files.items() if path.startswith(f"{folder}/")}
        del inside[f"{folder}/manifest.json"]
        assert inside == {f"{folder}/{one['path']}": (one["size"], one["sha256"]) for one in listed}
    return whole


def copied(source: Path, root: Path, step: int) -> Path:
    """A whole snapshot of that step, no tensor of which is the template's."""
    with atomic_snapshot(root, folder_name(step)) as folder:
        for path in source.iterdir():
            if path.name != "manifest.json":
                shutil.copy(path, folder)
        for path in folder.glob("*.safetensors"):
            moved = {name: tensor + step for name, tensor in load_file(path).items()}
            moved |= {name: torch.tensor(float(step)) for name in moved if name.endswith(".step")}
            save_file(moved, path, metadata={"format": "pt"})
        write_json(folder / "state.json", {**read_json(folder / "state.json"), "step": step})
    return root / folder_name(step)
