"""A snapshot whose optimizer has counted other updates is refused, however right its hashes are."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from small_snapshots import trained, write
from snapshot.disk.checking import check_snapshot
from snapshot.errors import SnapshotError
from snapshot.source import newest_snapshot
from snapshot.start import choose_start

QUERY = "transformer.h.0.attn.c_attn.weight"
NAN = float("nan")


def change(folder: Path, name: str, value: float, at: int = 5) -> None:
    """Put a number into a tensor of a snapshot, and make its manifest true again."""
    stem = "optimizer" if name.endswith((".step", ".exp_avg", ".exp_avg_sq")) else "model"
    tensors = load_file(folder / f"{stem}.safetensors")
    tensors[name].view(-1)[min(at, tensors[name].numel() - 1)] = value
    save_file(tensors, folder / f"{stem}.safetensors", metadata={"format": "pt"})
    seal(folder)


def seal(folder: Path, **state: object) -> None:
    """Make the manifest fit whatever the files are now, with `state` changed."""
    content = {**json.loads((folder / "state.json").read_text()), **state}
    (folder / "state.json").write_text(json.dumps(content))
    files = [
        {
            "path": path.name,
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(folder.iterdir())
        if path.name != "manifest.json"
    ]
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A run's folder with good snapshots of steps 1 and 2."""
    run_dir = tmp_path_factory.mktemp("made")
    for step in (1, 2):
        check_snapshot(write(run_dir / "snapshots", step, *trained(step)))
    return run_dir


@pytest.fixture
def run_dir(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


@pytest.fixture
def folder(run_dir) -> Path:
    """The newest snapshot, which a test may change."""
    return run_dir / "snapshots" / "step-00000002"


COUNTS = [
    (NAN, "has counted nan updates"),
    (-2.0, "has counted -2 updates"),
    (1.0, "is of step 2, but its optimizer has counted 1 updates"),
    (1.5, "has counted 1.5 updates"),
    (3.0, "has counted 3 updates"),
]


@pytest.mark.parametrize(("value", "sentence"), COUNTS)
def test_a_wrong_count_of_updates_is_refused_and_an_older_one_is_used(
    run_dir, folder, value, sentence
):
    good = run_dir / "snapshots" / "step-00000001"
    change(folder, f"{QUERY}.step", value)
    with pytest.raises(SnapshotError, match=sentence):
        check_snapshot(folder)
    assert newest_snapshot(run_dir) == good
    start = choose_start(run_dir, "auto")
    assert start.folder == good
    assert "skipped" in start.warnings[0]


def test_a_flipped_bit_is_damage_whatever_number_it_makes(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + struct.pack("<f", NAN))
    with pytest.raises(SnapshotError, match=r"model\.safetensors has changed"):
        check_snapshot(folder)


@pytest.mark.parametrize(
    ("step", "skipped", "counted"),
    [(5, 0, 5), (5, 3, 2), (5, 5, 0), (5, 3, 4), (2**24 + 9, 0, 2**24), (2**24 + 9, 2, 2**24)],
)
def test_updates_that_a_loss_scaler_skipped_are_not_missed(folder, step, skipped, counted):
    """Nor those beyond 2**24, from where a float32 that counts by ones stays."""
    path = folder / "optimizer.safetensors"
    tensors = load_file(path)
    tensors |= {name: torch.tensor(float(counted)) for name in tensors if name.endswith(".step")}
    save_file(tensors, path, metadata={"format": "pt"})
    seal(folder, skipped_steps=skipped, step=step)
    folder = folder.rename(folder.with_name(f"step-{step:08d}"))
    assert check_snapshot(folder).step == step
