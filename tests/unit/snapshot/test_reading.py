"""What lies in a snapshot's folder and is none of its files, and what is not read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from disks import as_anybody
from sealed import seal
from small_snapshots import trained, write
from snapshot.disk.checking import check_snapshot
from snapshot.disk.folder import atomic_snapshot, newest_verified, snapshot_folders
from snapshot.disk.load import file_by_name
from snapshot.errors import SnapshotError
from snapshot.source import newest_snapshot
from snapshot.start import choose_start
from store.kinds import named_repo

OF_THE_SYSTEM = (".DS_Store", "._model.safetensors", "Thumbs.db", "desktop.ini", ".nfs0000000001a2")
OTHERS = (".hidden", "DS_Store", "thumbs.db.exe", "model.pkl", "._", ".nfs", ".nfsx", "x.DS_Store")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A run's folder with good snapshots of steps 1 and 2."""
    run_dir = tmp_path_factory.mktemp("made")
    for step in (1, 2):
        write(run_dir / "snapshots", step, *trained(step))
    return run_dir


@pytest.fixture
def run_dir(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


@pytest.mark.parametrize("name", OF_THE_SYSTEM)
def test_what_file_managers_leave_in_a_snapshot_does_no_harm(run_dir, name):
    for folder in snapshot_folders(run_dir / "snapshots"):
        (folder / name).write_bytes(b"\0\0\0\1Bud1")
        check_snapshot(folder)
    (run_dir / "snapshots" / name).write_bytes(b"")
    assert newest_snapshot(run_dir).name == "step-00000002"


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_file_is_refused(run_dir, name):
    folder = run_dir / "snapshots" / "step-00000002"
    (folder / name).write_bytes(b"")
    with pytest.raises(SnapshotError, match="is not in its manifest"):
        check_snapshot(folder)


def test_a_model_that_is_downloaded_in_part_names_what_is_missing(tmp_path):
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = {"weight_map": {"a": files[0], "b": files[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.zeros(1)}, tmp_path / files[0])
    words = rf"lacks {files[1]}, which .* in part\? Fetch the rest with `hf download .* {tmp_path}`"
    with pytest.raises(SnapshotError, match=words):
        file_by_name(tmp_path, "model")
    for name in (files[1], "model-more.safetensors"):
        save_file({"b": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(SnapshotError, match=r"model-more\.safetensors is not among the files that"):
        file_by_name(tmp_path, "model")


def test_a_file_manager_s_leftovers_are_no_part_of_a_snapshot(tmp_path):
    with atomic_snapshot(tmp_path, "step-00000001") as folder:
        (folder / ".DS_Store").write_bytes(b"")
        (folder / "state.json").write_text("{}")
    assert ".DS_Store" not in (tmp_path / "step-00000001" / "manifest.json").read_text()


@pytest.mark.parametrize(
    "closed", [".", "manifest.json", "model.safetensors", "state.json", "tokenizer.json"]
)
def test_an_unreadable_snapshot_is_passed_over_in_a_sentence(run_dir, closed):
    (run_dir / "snapshots" / "step-00000002" / closed).chmod(0)
    with as_anybody():
        newest, faults = newest_verified(run_dir / "snapshots", check_snapshot)
    assert newest == run_dir / "snapshots" / "step-00000001"
    assert "cannot be read: Permission denied" in faults[0]


@pytest.mark.parametrize("closed", [".", "snapshots"])
def test_an_unreadable_run_is_not_one_without_snapshots(run_dir, tmp_path, monkeypatch, closed):
    monkeypatch.chdir(tmp_path)
    (run_dir / closed).chmod(0)
    with as_anybody():
        looks = [
            lambda: choose_start(run_dir, "auto"),
            lambda: newest_snapshot(run_dir),
            lambda: choose_start(tmp_path / "new", str(run_dir / "snapshots")),
        ]
        if closed == ".":
            looks.append(lambda: named_repo("run/snapshots"))
        for look in looks:
            with pytest.raises(SnapshotError, match=r"snapshots\S* cannot be read: Permission"):
                look()


def test_two_writers_of_one_snapshot_mix_nothing(tmp_path):
    """As two starts may, on a disk without locks."""

    def build_both() -> None:
        with atomic_snapshot(tmp_path, "step-00000001") as slow:
            (slow / "state.json").write_text("slow")
            with atomic_snapshot(tmp_path, "step-00000001") as fast:
                (fast / "state.json").write_text("fast")
            assert (slow / "state.json").read_text() == "slow"

    build_both()
    assert (tmp_path / "step-00000001" / "state.json").read_text() == "slow"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def count(folder: Path, value: float, most: int = 10**9) -> None:
    """Let the optimizer have counted so many updates, of at most so many parameters."""
    path = folder / "optimizer.safetensors"
    tensors = load_file(path)
    names = sorted(name for name in tensors if name.endswith(".step"))
    tensors |= {name: torch.tensor(value) for name in names[:most]}
    save_file(tensors, path, metadata={"format": "pt"})
    seal(folder)


COUNTS = [
    (float("nan"), "has counted nan updates"),
    (-2.0, "has counted -2 updates"),
    (1.0, "is of step 2, but its optimizer has counted 1 updates"),
    (1.5, "has counted 1.5 updates"),
    (3.0, "has counted 3 updates"),
]


@pytest.mark.parametrize(("value", "sentence"), COUNTS)
def test_a_wrong_count_of_updates_is_refused_and_an_older_one_is_used(run_dir, value, sentence):
    good, folder = (run_dir / "snapshots" / f"step-0000000{step}" for step in (1, 2))
    count(folder, value, 1)
    with pytest.raises(SnapshotError, match=sentence):
        check_snapshot(folder)
    assert newest_snapshot(run_dir) == good
    start = choose_start(run_dir, "auto")
    assert start.folder == good
    assert "skipped" in start.warnings[0]


@pytest.mark.parametrize(
    ("step", "skipped", "counted"),
    [(5, 0, 5), (5, 3, 2), (5, 5, 0), (5, 3, 4), (2**24 + 9, 0, 2**24), (2**24 + 9, 2, 2**24)],
)
def test_updates_that_a_loss_scaler_skipped_are_not_missed(run_dir, step, skipped, counted):
    """Nor those beyond 2**24, from where a float32 that counts by ones stays."""
    folder = run_dir / "snapshots" / "step-00000002"
    state = json.loads((folder / "state.json").read_text())
    state |= {"skipped_steps": skipped, "step": step}
    (folder / "state.json").write_text(json.dumps(state))
    count(folder, float(counted))
    folder = folder.rename(folder.with_name(f"step-{step:08d}"))
    assert check_snapshot(folder).step == step
