"""Nothing that the program did not create is ever removed or overwritten, in any folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from cloud.attempts import Attempts
from config.compose import load_config
from config.schema import ConfigError
from small_snapshots import state_at, trained, write
from snapshot.__main__ import main
from snapshot.disk.folder import MANIFEST, prune, verify
from snapshot.start import Start
from tracing.session import load_traced_config
from training.reporting.console import Console
from training.run.records import begin_records
from training.run.run_dir import RunLock, lock_run_dir

WEIGHTS = "model.safetensors"


def everything_in(folder: Path) -> dict[str, str]:
    """The content of every file below a folder, hidden ones and links included."""
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


OVERWRITTEN = ["config.yaml", "metrics.jsonl", "curves.png", "exit_code", "trackers/wandb.log"]
OVERWRITTEN += ["snapshots/photo.jpg", "snapshots/step-00000002/notes.txt"]


ALONE = SimpleNamespace(
    is_main_process=True,
    is_local_main_process=True,
    process_index=0,
    device="cpu",
    gather=lambda tensor: tensor,
)
"""The accelerator of one process, as far as a start asks it."""


def locked(run_dir: Path) -> None:
    """What the start of a run does with its directory first, and its end where that refuses."""
    lock = RunLock()
    lock.leave_code_in(run_dir)
    try:
        lock_run_dir(ALONE, load_config([f"run.dir={run_dir}"]), lock)
    except ConfigError:
        lock.note_exit(2)
        raise
    lock._lock.release()


def put(path: Path, content: str = "the user's") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


@pytest.mark.parametrize("name", OVERWRITTEN)
def test_a_folder_with_a_foreign_file_is_refused_as_it_is(tmp_path, name):
    put(tmp_path / name)
    before = everything_in(tmp_path)
    with pytest.raises(ConfigError, match=r"holds .*, which no run of this project wrote"):
        locked(tmp_path)
    assert everything_in(tmp_path) == before


def test_a_start_that_is_killed_after_its_first_line_may_start_again(tmp_path):
    config = load_config([f"run.dir={tmp_path / 'run'}"])
    locked(tmp_path / "run")
    begin_records(Console(False, 10, 0), config, Start(None, None, ""), state_at(0))
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_size
    locked(tmp_path / "run")


def test_what_a_run_has_left_at_any_moment_is_its_own(finished_run, tmp_path):
    """Also one that was killed early, or copied in part."""
    begun = tmp_path / "begun"  # as a start that is killed leaves it
    (begun / "snapshots" / ".tmp-download").mkdir(parents=True)
    for name in (".lock", "metrics.jsonl", "config.yaml"):
        put(begun / name, "")
    put(begun / "exit_code", "2\n")
    put(begun / "logs" / "machine-0.log")
    shutil.copytree(finished_run / "snapshots", tmp_path / "part" / "snapshots")
    put(tmp_path / "part" / "curves.png")
    put(tmp_path / "part" / "snapshots" / "step-00000010" / "manifest.json", "half")
    locked(begun)
    locked(tmp_path / "part")


def test_a_folder_where_a_snapshot_will_be_is_moved_aside(tmp_path):
    place = write(tmp_path, 1, *trained(1))
    put(place / "notes.txt")  # it damages a snapshot
    verify(write(tmp_path, 1, *trained(1)))
    (first,) = tmp_path.glob("*.old-*")
    assert (first / "notes.txt").read_text() == "the user's"
    assert (first / WEIGHTS).is_file()
    shutil.rmtree(place)
    place.symlink_to(first)
    verify(write(tmp_path, 1, *trained(1)))
    (second,) = {*tmp_path.glob("*.old-*")} - {first}
    assert second.readlink() == first
    assert not place.is_symlink()


def test_only_snapshots_count_and_what_holds_more_stays(tmp_path):
    """So do those of later steps, which may be damaged, so that this attempt began before them."""
    places = {step: tmp_path / f"step-{step:08d}" for step in (*range(7), 90)}
    for step in (*range(1, 6), 90):
        write(tmp_path, step, *trained(1))
    (places[4] / MANIFEST).unlink()
    put(places[1] / "notes.txt")
    places[0].symlink_to(places[1])
    prune(tmp_path, 5, keep=2)
    assert {step for step in places if places[step].exists()} == {0, 1, 3, 4, 5, 90}
    write(tmp_path, 6, *trained(1))
    prune(tmp_path, 6, keep=2)
    assert {step for step in places if places[step].exists()} == {0, 1, 4, 5, 6, 90}


def test_commands_that_write_a_folder_replace_none(finished_run, tmp_path, capsys):
    space = tmp_path / "space"
    assert main(["space", str(finished_run), "--to", str(space)]) == 0
    mine = put(space / "thesis.txt")
    (tmp_path / "link").symlink_to(space)
    for target in (space, tmp_path / "link", mine):
        assert main(["space", str(finished_run), "--to", str(target)]) == 2
        assert "exists already. Name a new folder" in capsys.readouterr().err
    assert mine.exists()
    (tmp_path / "run-trace").symlink_to(finished_run)
    with pytest.raises(ConfigError, match="holds a run with snapshots"):
        load_traced_config([f"run.dir={tmp_path / 'run'}"])


def test_a_file_that_holds_no_exit_code_is_none(tmp_path):
    mine = put(tmp_path / "exit_code")
    assert Attempts(["false"], tmp_path).run(0, ()) == 1
    lock = RunLock()
    lock.leave_code_in(tmp_path)
    lock.note_exit(2)
    assert mine.read_text() == "the user's"
