"""Promise 3: a snapshot is whole or it does not exist, also on a disk that is full."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest

import runs
from disks import Tmpfs, mounted
from paced import paced, read_until
from snapshot.disk.folder import newest_verified, snapshot_folders, verify
from snapshot.errors import SnapshotError


@pytest.fixture
def copied_run(finished_run, tmp_path) -> Path:
    """A run of three snapshots that a test may damage."""
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 0x10
    path.write_bytes(content)


def lie(manifest_path: Path, **changes) -> None:
    manifest = json.loads(manifest_path.read_text())
    manifest["files"][0].update(changes)
    manifest_path.write_text(json.dumps(manifest))


def replace_by_a_link(path: Path) -> None:
    path.symlink_to(path.rename(path.parent.parent / path.name))


def replace_by(make, path: Path) -> None:
    path.unlink()
    make(path)


MODEL, MANIFEST = "model.safetensors", "manifest.json"
DAMAGES = {
    "a flipped byte": (flip_a_byte, MODEL, "model.safetensors has changed"),
    "a flipped moment": (flip_a_byte, "optimizer.safetensors", "optimizer.safetensors has changed"),
    "a truncated file": (lambda path: os.truncate(path, 1000), MODEL, "has 1,000 bytes instead of"),
    "a missing file": (Path.unlink, "tokenizer.json", "tokenizer.json is missing"),
    "a missing manifest": (Path.unlink, MANIFEST, "it has no manifest.json"),
    "a wrong size": (partial(lie, size=3), MANIFEST, "instead of 3"),
    "a wrong hash": (partial(lie, sha256="0" * 64), MANIFEST, "config.json has changed"),
    "a way out": (partial(lie, path="../state.json"), MANIFEST, "is not a manifest of this format"),
    "no JSON": (lambda path: path.write_text("{"), MANIFEST, "cannot be read"),
    "one file more": (Path.touch, "extra.json", "extra.json is not in its manifest"),
    "a link": (replace_by_a_link, "config.json", "config.json is not a plain file"),
    "a folder": (partial(replace_by, Path.mkdir), "config.json", "config.json is not a plain file"),
    "a pipe": (partial(replace_by, os.mkfifo), MODEL, "model.safetensors is not a plain file"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_named(copied_run, name):
    damage, file, sentence = DAMAGES[name]
    folder = runs.snapshot(copied_run, 30)
    verify(folder)
    damage(folder / file)
    with pytest.raises(SnapshotError, match=sentence.replace(".", r"\.")):
        verify(folder)
    newest, faults = newest_verified(snapshot_folders(copied_run / "snapshots"))
    assert newest == runs.snapshot(copied_run, 20)
    assert len(faults) == 1


def test_a_damaged_newest_is_passed_over_and_made_again(copied_run, finished_run, small):
    flip_a_byte(runs.snapshot(copied_run, 30) / "model.safetensors")
    result = runs.train(*small, "model.dropout=0.1", f"run.dir={copied_run}", code=0)
    assert "warning:" in result.stdout
    assert "model.safetensors has changed; skipped" in result.stdout
    assert "step-00000020, the newest of this run" in result.stdout
    runs.assert_same_bits(runs.snapshot(finished_run, 30), runs.snapshot(copied_run, 30))
    verify(runs.snapshot(copied_run, 30))


def test_without_a_whole_snapshot_a_run_does_not_start_over(copied_run, small):
    for folder in snapshot_folders(copied_run / "snapshots"):
        flip_a_byte(folder / "optimizer.safetensors")
    result = runs.train(*small, "model.dropout=0.1", f"run.dir={copied_run}", code=2)
    assert "none of the 3 snapshots" in result.stderr
    assert f"move {copied_run} away to start over" in result.stderr


def test_a_full_disk_costs_a_snapshot_and_nothing_else(small, small_disk):
    breaks_and_is_mended(small, small_disk.folder / "run", small_disk.fill, small_disk.empty)


@pytest.mark.thorough
def test_a_read_only_disk_costs_a_snapshot_and_nothing_else(small, tmp_path):
    # The snapshots' alone: the run's lock, an open file, would hold up a remount of its own.
    (tmp_path / "run").mkdir()
    place = tmp_path / "run" / "snapshots"
    with mounted(place, lambda: Tmpfs(place)) as disk:
        breaks_and_is_mended(small, tmp_path / "run", disk.make_read_only, disk.make_writable)


def breaks_and_is_mended(small, run_dir: Path, break_it, mend_it) -> None:
    """A run whose disk takes no second snapshot for a while."""
    words = runs.command(*small, f"run.dir={run_dir}", "train.max_steps=200", "snapshot.every=20")
    with paced(words) as (process, lines):
        said = read_until(lines, "step 25/")
        runs.wait_until(runs.snapshot(run_dir, 20).exists, process)
        says = break_it()
        said += read_until(lines, "could not be written")
        warning = said[-1]
        newest, faults = newest_verified(snapshot_folders(run_dir / "snapshots"))
        # The next one may be tried right now.
        runs.wait_until(lambda: not list((run_dir / "snapshots").glob(".tmp-*")), process)
        mend_it()
        said += lines
        assert process.wait(60) == 0, process.stderr.read()
    assert newest is not None, said
    assert faults == []
    assert says in warning
    assert f"The last good snapshot stays: {newest}" in warning
    assert len(snapshot_folders(run_dir / "snapshots")) == 3
    verify(runs.snapshot(run_dir, 200))
    assert len(runs.losses(run_dir)) == 200


def test_a_last_snapshot_that_cannot_be_written_is_a_failure(small, small_disk):
    (small_disk.folder / "ballast").write_bytes(bytes(4_100_000))
    result = runs.train(*small, f"run.dir={small_disk.folder / 'run'}", "train.max_steps=5", code=1)
    assert "stopped: the snapshot of step 5 could not be written" in result.stderr
    assert "start the same command again" in result.stderr
    assert "Traceback" not in result.stderr
