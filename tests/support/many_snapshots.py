"""A hundred snapshots of one run, uploaded one after the other; for a process of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from snapshot.disk.folder import (
    atomic_snapshot,
    folder_name,
    manifest_sha256,
    read_json,
    write_json,
)
from snapshot.disk.state import read_state
from store.attempt import Card, Policy, UploadTarget
from store.hub import Hub
from store.uploader import Uploader

COUNT = 100


def upload(template: str, repo_id: str, note: Callable[[], object]) -> None:
    """Upload copies of a snapshot as steps 1 to 100, each with weights of its own.

    `note` is called after each.
    """
    source, root = Path(template), Path(tempfile.mkdtemp())
    state = read_state(source)
    hub = Hub(repo_id)
    hub.create(private=True)
    policy = Policy(3, 0.0, private=True, takeover=False)
    uploads = Uploader(UploadTarget(hub, policy, state.run_id, "attempt"))
    for step in range(1, COUNT + 1):
        folder = copied(source, root, step)
        uploads.offer(folder, Card(f"# step {step}\n"))
        assert uploads.flush(60), uploads.status()
        assert uploads.status().step == step
        shutil.rmtree(folder)
        note()
    assert not uploads.messages()


def copied(source: Path, root: Path, step: int) -> Path:
    """A whole snapshot of that step, no tensor of which is the template's."""
    with atomic_snapshot(root, folder_name(step)) as folder:
        for path in source.iterdir():
            if path.name == "manifest.json":
                continue
            shutil.copy(path, folder)
        for path in folder.glob("*.safetensors"):
            moved = {name: tensor + step for name, tensor in load_file(path).items()}
            moved |= {name: torch.tensor(float(step)) for name in moved if name.endswith(".step")}
            save_file(moved, path, metadata={"format": "pt"})
        write_json(folder / "state.json", {**read_json(folder / "state.json"), "step": step})
    assert manifest_sha256(root / folder_name(step))
    return root / folder_name(step)
