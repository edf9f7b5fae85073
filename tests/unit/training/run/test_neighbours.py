"""What a machine keeps when another one sends it the newest snapshot."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import runs
from config.compose import load_config
from small_snapshots import trained, write
from snapshot.disk.files import MANIFEST, manifest_entries, snapshot_folders, step_of
from training.run import neighbours
from training.run.neighbours import NONE, share_newest
from training.run.run_dir import RunLock


@pytest.mark.parametrize("is_main", [True, False])
def test_the_main_process_keeps_what_an_upload_or_best_json_may_need(
    tmp_path, monkeypatch, is_main
):
    """It knows only later which those are: the best, and milestones that are not uploaded."""
    config = load_config([f"run.dir={tmp_path / 'run'}", "snapshot.keep=2"])
    for step in (1, 2):
        write(tmp_path / "run" / "snapshots", step, *trained(step))
    sent = write(tmp_path / "other machine", 3, *trained(3))
    _, theirs = neighbours._newest(sent.parent, set())
    files = [MANIFEST, *manifest_entries(sent)]

    def gathered(_: object, numbers: tuple[int, ...]) -> list[list[int]]:
        mine = list(numbers)
        return [mine, list(theirs) if len(mine) == len(NONE[1]) else [0]]

    monkeypatch.setattr(neighbours, "is_one_machine", lambda: False)
    monkeypatch.setattr(neighbours, "_gathered", gathered)
    monkeypatch.setattr(neighbours, "_files_of", lambda *_: [(name, 0) for name in files])
    parts = ((name, (sent / name).read_bytes()) for name in files)
    monkeypatch.setattr(neighbours, "_sent", lambda *_: parts)
    monkeypatch.setattr(neighbours, "broadcast_text", lambda _, text, source: text)
    lock = RunLock()
    lock.acquire(tmp_path / "run")
    machine = SimpleNamespace(**vars(runs.ALONE) | {"is_main_process": is_main})
    share_newest(machine, config, lock)
    kept = [step_of(folder) for folder in snapshot_folders(tmp_path / "run" / "snapshots")]
    assert kept == ([3, 2, 1] if is_main else [3, 2])
