"""Nothing that the program did not create is ever removed or overwritten, in any folder."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

import runs
from cloud.attempts import Attempts
from config.compose import load_config
from config.schema import ConfigError
from small_snapshots import trained, write
from snapshot.__main__ import main
from snapshot.base import Base, keep_base
from snapshot.disk.files import verify
from snapshot.disk.pruning import prune
from snapshot.errors import SnapshotError
from tracing.session import load_traced_config
from training.run.run_dir import RunLock
from training.run.start import lock_run_dir

WEIGHTS = "model.safetensors"


def model_in(folder: Path, content: str = "the user's only copy") -> Base:
    """A model of the user's, with a file that is no part of it."""
    folder.mkdir(parents=True)
    for name in (WEIGHTS, "config.json", "notes.txt"):
        (folder / name).write_text(f"{name}: {content}")
    return Base("model.pretrained", str(folder), folder)


def everything_in(folder: Path) -> dict[str, str]:
    """The content of every file below a folder, links included."""
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def no_links(monkeypatch):
    """As between two file systems."""

    def link(*_):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", link)


def test_a_base_in_the_runs_directory_stays_as_it_is(tmp_path):
    base = model_in(tmp_path / "run" / "base")
    before = everything_in(tmp_path / "run")
    assert keep_base(base, tmp_path / "run").folder == base.folder
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "base").symlink_to(base.folder)
    assert keep_base(base, tmp_path / "other").folder == base.folder
    assert everything_in(tmp_path / "run") == before


@pytest.mark.parametrize("linked", [False, True])
def test_another_model_in_the_run_s_directory_stays(tmp_path, linked):
    run_dir, base = tmp_path / "run", model_in(tmp_path / "named")
    place = model_in(tmp_path / "other" if linked else run_dir / "base", "another").folder
    run_dir.mkdir(exist_ok=True)
    if linked:
        (run_dir / "base").symlink_to(place)
    before = everything_in(tmp_path)
    with pytest.raises(SnapshotError, match="move it away, or give the run another"):
        keep_base(base, run_dir)
    assert everything_in(tmp_path) == before


def test_a_base_that_cannot_be_linked_stays_with_all_beside_it(tmp_path, no_links):
    run_dir, base = tmp_path / "run", model_in(tmp_path / "named")
    assert keep_base(base, run_dir) == base
    assert list(run_dir.iterdir()) == []
    (run_dir / "base").mkdir()
    (run_dir / "base" / "notes.txt").write_text("the user's")
    before = everything_in(tmp_path)
    assert keep_base(base, run_dir) == base
    assert everything_in(tmp_path) == before


def test_a_copied_base_is_whole_or_absent_and_kept_once(tmp_path, no_links, monkeypatch):
    run_dir, base = tmp_path / "run", model_in(tmp_path / "step-00000010")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", lambda _, to: Path(to).write_text("hal"))
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):  # where a kill -9 may come, too
            keep_base(base, run_dir)
    for _ in range(2):
        kept = keep_base(base, run_dir).folder
        assert kept == run_dir / "base"
        assert {path.name for path in kept.iterdir()} == {WEIGHTS, "config.json"}
        assert (kept / WEIGHTS).read_text() == (base.folder / WEIGHTS).read_text()


OVERWRITTEN = [
    "config.yaml",
    "config.yaml.new",
    "metrics.jsonl",
    "events.jsonl",
    "best.json",
    "attempts.txt",
    "curves.png",
    "exit_code",
    "trackers/wandb.log",
    "snapshots/photo.jpg",
    "snapshots/step-00000002/notes.txt",
    "trace.json",
    "profile_0.json",
]


def locked(run_dir: Path) -> None:
    """What the start of a run does with its directory first."""
    lock = RunLock()
    lock_run_dir(runs.ALONE, load_config([f"run.dir={run_dir}"]), lock)
    lock.release()


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


def test_a_run_starts_in_no_foreign_folder(small, tmp_path):
    mine = put(tmp_path / "exit_code"), put(tmp_path / "config.yaml", "model: {}\n")
    result = runs.train(*small, f"run.dir={tmp_path}")
    assert result.returncode == 2
    assert f"run.dir={tmp_path} holds config.yaml, which no run of this project" in result.stderr
    assert [path.read_text() for path in mine] == ["the user's", "model: {}\n"]


def test_what_a_run_has_left_at_any_moment_is_its_own(finished_run, tmp_path):
    """Also runs of older versions, which were killed early, or copied in part."""
    begun = tmp_path / "begun"  # as a start that is killed leaves it
    (begun / "snapshots" / ".download").mkdir(parents=True)
    for name in (".lock", "events.jsonl", "metrics.jsonl", "config.yaml"):
        put(begun / name, "")
    put(begun / "exit_code", "2\n")
    put(begun / "logs" / "machine-0.log")
    put(begun / "base" / WEIGHTS)
    for kept in ("config.yaml", "metrics.jsonl", "events.jsonl", "snapshots"):
        part = tmp_path / kept
        part.mkdir()
        copy = shutil.copytree if kept == "snapshots" else shutil.copyfile
        copy(finished_run / kept, part / kept)
        put(part / "curves.png")
    (tmp_path / "snapshots" / "snapshots" / "step-00000010" / "manifest.json").write_text("half")
    for run_dir in tmp_path.iterdir():
        locked(run_dir)


def test_a_folder_where_a_snapshot_will_be_is_set_aside(tmp_path):
    place, aside = tmp_path / "step-00000001", "step-00000001.old-{}"
    for number in (1, 2):  # the second time it damages a snapshot
        put(place / "notes.txt")
        verify(write(tmp_path, 1, *trained(1)))
        assert (tmp_path / aside.format(number) / "notes.txt").is_file()
    place.rename(tmp_path / "here").joinpath("state.json").unlink()
    place.symlink_to(tmp_path / "here")
    verify(write(tmp_path, 1, *trained(1)))
    assert (tmp_path / aside.format(3)).readlink() == tmp_path / "here"
    assert (tmp_path / "here" / WEIGHTS).is_file()


def test_only_whole_snapshots_count_and_what_holds_more_stays(tmp_path):
    places = {step: tmp_path / f"step-{step:08d}" for step in range(7)}
    for step in range(1, 6):
        write(tmp_path, step, *trained(step))
    (places[4] / WEIGHTS).unlink()
    put(places[1] / "notes.txt")
    places[0].symlink_to(places[1])
    prune(tmp_path, keep=2, newest=5)
    assert {step for step in places if places[step].exists()} == {0, 1, 3, 4, 5}
    write(tmp_path, 6, *trained(6))
    prune(tmp_path, keep=2, newest=6)
    assert {step for step in places if places[step].exists()} == {0, 1, 5, 6}


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
