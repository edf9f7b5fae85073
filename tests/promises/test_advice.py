"""Each advice about snapshots and repos works: here it is followed, as it is printed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import hubs
import runs
from config.compose import load_config
from config.schema import Config
from sealed import seal
from snapshot.__main__ import main
from snapshot.disk.state import read_state
from snapshot.errors import SnapshotError
from snapshot.start import Start
from store.errors import StoreError
from training.run import start
from training.run.run_dir import RunLock

HERE, THERE = "hub.repo_id=me/run", "hub.repo_id=me/other"


@pytest.fixture
def begins(small, tmp_path, monkeypatch):
    """What the command with these words begins with: step and run; the text says where."""
    monkeypatch.chdir(tmp_path)

    def begun(*words: str) -> Start:
        config = load_config([*small, "hub.timeout_seconds=5", *words])
        return chosen(config)

    return begun


def chosen(config: Config) -> Start:
    lock = RunLock()
    lock.acquire(Path(config.run.dir))
    try:
        return start._choose(config, lock)
    finally:
        lock.release()


@pytest.fixture
def refused(begins):
    """The sentence with which it is refused."""

    def sentence(*words: str) -> str:
        with pytest.raises((SnapshotError, StoreError)) as caught:
            begins(*words)
        return str(caught.value)

    return sentence


@pytest.fixture
def in_repo(near_hub, a_run):
    """The same run in its repo."""
    hubs.seed(near_hub, *(runs.snapshot(a_run, step) for step in (10, 20, 30)))
    return near_hub


@pytest.fixture
def put_in_repo(near_hub, a_run):
    """Its last two snapshots in its repo, without the client."""
    run_id = read_state(runs.snapshot(a_run, 30)).run_id
    for step in (20, 30):
        hubs.put(near_hub, runs.snapshot(a_run, step), step, run=run_id)
    return near_hub


def damage(snapshot: Path) -> None:
    (snapshot / "model.safetensors").write_bytes(b"damaged")


def test_to_return_to_an_earlier_step(a_run, begins, refused):
    early = runs.snapshot(a_run, 10)
    said = refused("run.name=mine", f"snapshot.resume={early}")
    assert "give it another run.name" in said
    new = begins("run.name=new", f"snapshot.resume={early}").state
    assert new.step == 10
    assert new.run_id != read_state(early).run_id
    assert f"remove its newer snapshots from {Path('out/mine/snapshots')}" in said
    shutil.rmtree(runs.snapshot(a_run, 20))
    shutil.rmtree(runs.snapshot(a_run, 30))
    assert begins("run.name=mine").state.step == 10


def test_to_return_to_an_earlier_step_of_a_run_with_a_repo(in_repo, a_run, begins, refused):
    early = f"snapshot.resume={runs.snapshot(a_run, 10)}"
    said = refused("run.name=mine", HERE, early)
    assert "another run.name (and run.dir, if that is set), and another hub.repo_id." in said
    assert "remove its newer" not in said  # they would come back from the repo
    assert begins("run.name=new", THERE, early).state.step == 10


def test_of_two_runs_at_one_repo(in_repo, a_run, finished_run, begins, refused, tmp_path):
    other = runs.snapshot(tmp_path / "out" / "other", 10)
    shutil.copytree(runs.snapshot(finished_run, 10), other)
    state = (other / "state.json").read_text()
    run_id = read_state(other).run_id
    (other / "state.json").write_text(state.replace(run_id, "f" * 32))
    seal(other)
    said = refused("run.name=other", HERE)
    assert "name another store, or replace what this one holds with hub.takeover=true" in said
    assert begins("run.name=other", THERE).state.run_id == "f" * 32
    assert begins("run.name=other", HERE, "hub.takeover=true").state.run_id == "f" * 32
    assert "to continue the run in the store, give another run.name" in said
    assert begins("run.name=third", HERE).state.run_id == run_id


def test_no_whole_snapshot_here(a_run, begins, refused):
    for step in (10, 20, 30):
        damage(runs.snapshot(a_run, step))
    said = refused("run.name=mine")
    assert f"or move {Path('out/mine')} away to start over" in said
    a_run.rename(a_run.parent / "away")
    assert begins("run.name=mine").folder is None


def test_no_whole_snapshot_in_the_repo(near_hub, a_run, finished_run, begins, refused, tmp_path):
    copy = shutil.copytree(runs.snapshot(finished_run, 10), tmp_path / "copy" / "step-00000010")
    (copy / "optimizer.safetensors").write_bytes(b"damaged")
    hubs.put(near_hub, copy, 10, run=read_state(copy).run_id)
    said = refused("run.name=new", HERE)
    assert "Start again in another store." in said
    assert begins("run.name=new", THERE).folder is None


def test_a_named_run_that_is_not_whole(in_repo, begins, refused, a_run):
    damage(runs.snapshot(a_run, 30))
    said = refused("run.name=new", f"snapshot.resume={runs.snapshot(a_run, 30)}")
    assert "Name a snapshot that is whole, a run's folder, or its store" in said
    for other in (runs.snapshot(a_run, 20), a_run):
        assert begins("run.name=new", f"snapshot.resume={other}").state.step == 20
    assert begins("run.name=new", "snapshot.resume=me/run").state.step == 30


def nothing(hub, run_dir: Path) -> None:
    """The run lies on this disk and in its repo."""


def damaged_latest(hub, run_dir: Path) -> None:
    hub.commit_files(hubs.REPO, {"latest.json": b"{"})


def restored_latest(hub, run_dir: Path) -> None:
    repo = hub.repo(hubs.REPO)
    earlier = next(one for one in reversed(repo.every_head[:-1]) if one != repo.head)
    hub.commit_files(hubs.REPO, {"latest.json": repo.read(earlier, "latest.json")})


def foreign_file(hub, run_dir: Path) -> None:
    hub.create("me/foreign")
    hub.commit_files("me/foreign", {"notes.txt": b"mine"})


def public_repo(hub, run_dir: Path) -> None:
    hub.create("me/public", private=False)


def hub_down(hub, run_dir: Path) -> None:
    hub.down()


def hub_up(hub, run_dir: Path) -> None:
    hub.up()


def snapshots_gone(hub, run_dir: Path) -> None:
    line = {"event": "train", "step": 1, "loss": 1.0}
    (run_dir / "metrics.jsonl").write_text(f"{json.dumps(line)}\n")
    (run_dir / "snapshots").rename(run_dir.parent / "copy")


def snapshots_restored(hub, run_dir: Path) -> None:
    (run_dir.parent / "copy").rename(run_dir / "snapshots")


def moved_away(hub, run_dir: Path) -> None:
    run_dir.rename(run_dir.parent / "away")


def folder_of_that_name(hub, run_dir: Path) -> None:
    Path("me").mkdir()


RESUME = "snapshot.resume=me/run"
FOLLOWED = {
    "a latest.json that is damaged: elsewhere": (
        damaged_latest,
        ["run.name=new", HERE],
        "continue from its snapshots with snapshot.resume=hf://me/run, another run.name and a new",
        nothing,
        (["run.name=third", THERE, "snapshot.resume=hf://me/run"], 30),
    ),
    "a latest.json that is damaged: restored": (
        damaged_latest,
        ["run.name=new", HERE],
        "If a run owns it, restore that file",
        restored_latest,
        (["run.name=new", HERE], 30),
    ),
    "a repo of something else": (
        foreign_file,
        ["run.name=new", "hub.repo_id=me/foreign"],
        "Name one that is new or empty",
        nothing,
        (["run.name=new", THERE], None),
    ),
    "a public repo: allowed": (
        public_repo,
        ["run.name=new", "hub.repo_id=me/public"],
        "or allow it with hub.private=false",
        nothing,
        (["run.name=new", "hub.repo_id=me/public", "hub.private=false"], None),
    ),
    "no Hub: a new run": (
        hub_down,
        ["run.name=new", HERE],
        "a run that is new can begin without hub.repo_id",
        nothing,
        (["run.name=new"], None),
    ),
    "no Hub: later": (
        hub_down,
        ["run.name=new", HERE],
        "Start again when it can be reached",
        hub_up,
        (["run.name=new", HERE], 30),
    ),
    "no snapshots: restored": (
        snapshots_gone,
        ["run.name=mine"],
        "Restore that from a copy",
        snapshots_restored,
        (["run.name=mine"], 30),
    ),
    "no snapshots: anew": (
        snapshots_gone,
        ["run.name=mine"],
        "or move out/mine away to start over",
        moved_away,
        (["run.name=mine"], None),
    ),
    "a folder with the owner's name": (
        folder_of_that_name,
        ["run.name=new", "snapshot.resume=me/run"],
        "for the repo of that name on the Hub write hf://me/run",
        nothing,
        (["run.name=new", "snapshot.resume=hf://me/run"], 30),
    ),
    "another name is no folder and no repo": (
        nothing,
        ["run.name=new", "snapshot.resume=nowhere"],
        "(owner/name or owner/name@revision)",
        nothing,
        (["run.name=new", RESUME], 30),
    ),
    "a run with a snapshot that is not whole": (
        lambda hub, run_dir: damage(runs.snapshot(run_dir, 30)),
        ["run.name=new", "snapshot.resume=out/mine/snapshots/step-00000030"],
        "Name a snapshot that is whole, a run's folder, or its store",
        nothing,
        (["run.name=new", "snapshot.resume=out/mine"], 20),
    ),
}
"""By case: what has happened, a command that is refused, its advice, what that asks for, and the
command that follows it with the step that it begins at."""


@pytest.mark.parametrize("case", FOLLOWED)
def test_advice_is_followed(put_in_repo, a_run, begins, refused, case):
    happens, words, advice, then, (corrected, step) = FOLLOWED[case]
    happens(put_in_repo, a_run)
    assert advice in refused(*words)
    then(put_in_repo, a_run)
    state = begins(*corrected).state
    assert (None if state is None else state.step) == step


def test_a_missing_revision_is_looked_up_as_the_sentence_says(put_in_repo, refused, capsys):
    said = refused("run.name=new", "snapshot.resume=me/run@none")
    command = said.partition("`python -m snapshot ")[2].partition("`")[0]
    assert command == "list me/run"
    assert main(command.split()) == 0
    assert "step         30" in capsys.readouterr().out
