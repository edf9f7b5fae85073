"""What lies in a snapshot's folder and is none of its files, and what is not read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from disks import as_anybody
from small_snapshots import trained, write
from snapshot.disk.checking import check_snapshot
from snapshot.disk.folder import (
    atomic_snapshot,
    manifest_entries,
    newest_verified,
    snapshot_folders,
)
from snapshot.disk.load import files_of
from snapshot.errors import SnapshotError
from snapshot.source import find
from snapshot.start import choose_start

OF_THE_SYSTEM = (".DS_Store", "._model.safetensors", "Thumbs.db", ".nfs0000000001a2")
OTHERS = (".hidden", "thumbs.db.exe", "model.pkl", ".nfsx")


@pytest.fixture
def run_dir(tmp_path) -> Path:
    """A run's folder with good snapshots of steps 1 and 2."""
    for step in (1, 2):
        write(tmp_path / "run" / "snapshots", step, *trained(step))
    return tmp_path / "run"


def test_what_file_managers_leave_is_ignored_and_any_other_file_is_refused(run_dir):
    newest = run_dir / "snapshots" / "step-00000002"
    for name in OF_THE_SYSTEM:
        for folder in (newest, newest.parent):
            (folder / name).write_bytes(b"\0\0\0\1Bud1")
    check_snapshot(newest)
    assert find(str(run_dir)).fetch().path == newest
    for name in OTHERS:
        (newest / name).write_bytes(b"")
        with pytest.raises(SnapshotError, match="is not in its manifest"):
            check_snapshot(newest)
        (newest / name).unlink()


def test_a_model_that_is_downloaded_in_part_names_what_is_missing(tmp_path):
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = {"weight_map": {"a": files[0], "b": files[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.zeros(1)}, tmp_path / files[0])
    words = rf"lacks {files[1]}, which .* in part\? Fetch the rest with `hf download .* {tmp_path}`"
    with pytest.raises(SnapshotError, match=words):
        files_of(tmp_path, "model")
    for name in (files[1], "model-more.safetensors"):
        save_file({"b": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(SnapshotError, match=r"model-more\.safetensors is not among the files that"):
        files_of(tmp_path, "model")


@pytest.mark.parametrize("closed", [".", "manifest.json", "model.safetensors", "tokenizer.json"])
def test_an_unreadable_snapshot_is_passed_over_in_a_sentence(run_dir, closed):
    (run_dir / "snapshots" / "step-00000002" / closed).chmod(0)
    with as_anybody():
        newest, faults = newest_verified(snapshot_folders(run_dir / "snapshots"), check_snapshot)
    assert newest == run_dir / "snapshots" / "step-00000001"
    assert "cannot be read: Permission denied" in faults[0]


@pytest.mark.parametrize("closed", [".", "snapshots"])
def test_an_unreadable_run_is_not_one_without_snapshots(run_dir, tmp_path, closed):
    (run_dir / closed).chmod(0)
    with as_anybody():
        for look in (
            lambda: choose_start(run_dir, "auto"),
            lambda: find(str(run_dir)).fetch(),
            lambda: choose_start(tmp_path / "new", str(run_dir / "snapshots")),
        ):
            with pytest.raises(SnapshotError, match=r"snapshots\S* cannot be read: Permission"):
                look()


def test_two_writers_of_one_snapshot_mix_nothing(tmp_path):
    """As two starts may, on a disk without locks."""
    with atomic_snapshot(tmp_path, "step-00000001") as slow:
        (slow / "state.json").write_text("slow")
        with atomic_snapshot(tmp_path, "step-00000001") as fast:
            (fast / "state.json").write_text("fast")
    assert (tmp_path / "step-00000001" / "state.json").read_text() == "slow"
    assert manifest_entries(tmp_path / "step-00000001").keys() == {"state.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
