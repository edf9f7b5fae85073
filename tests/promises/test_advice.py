"""Each advice about snapshots, stores and folders works: here it is followed, as it is printed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from accelerate import Accelerator
from omegaconf import OmegaConf

import hubs
import runs
from config.compose import load_config
from config.schema import ConfigError
from config.stored import as_plain
from sealed import seal
from snapshot.disk.state import read_state
from snapshot.errors import OtherRun, SnapshotError
from store.errors import StoreError
from training.run.run_dir import RunLock, refuse_foreign
from training.run.start import agree_on_start, refuse_other_run

RUN_DIR = Path("out/mine")
ANOTHER_RUN = "f" * 32


@pytest.fixture
def begins(small, tmp_path, monkeypatch):
    """The step that a command with these words begins after; None at the beginning."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("training.run.run_dir.WAIT_SECONDS", 0.2)

    def begun(words: str) -> int | None:
        config = load_config([*small, "hub.timeout_seconds=5", *words.split()])
        lock, run_dir = RunLock(), Path(config.run.dir)
        refuse_foreign(run_dir)
        lock.acquire(run_dir)
        try:
            state = agree_on_start(Accelerator(cpu=True), config, lock).state
        finally:
            lock._lock.release()
        return None if state is None else state.step

    return begun


@pytest.fixture
def refused(begins):
    """The sentence with which it is refused."""

    def sentence(words: str) -> str:
        with pytest.raises((ConfigError, SnapshotError, StoreError)) as caught:
            begins(words)
        return str(caught.value)

    return sentence


@pytest.fixture
def in_repo(near_hub, a_run):
    """Its last two snapshots in its repo, without the client."""
    run_id = read_state(runs.snapshot(a_run, 30)).run_id
    for step in (20, 30):
        hubs.put(near_hub, runs.snapshot(a_run, step), step, run=run_id)
    return near_hub


# What has happened, and what an advice asks for: each is given the Hub.


def nothing(hub) -> None:
    """The run lies on this disk and in its repo."""


def remove_newer(hub) -> None:
    for step in (20, 30):
        shutil.rmtree(runs.snapshot(RUN_DIR, step))


def damage(*steps: int) -> Callable:
    def change(hub) -> None:
        for step in steps:
            (runs.snapshot(RUN_DIR, step) / "model.safetensors").write_bytes(b"damaged")

    return change


def lose_snapshots(hub) -> None:
    line = {"event": "train", "step": 1, "loss": 1.0}
    (RUN_DIR / "metrics.jsonl").write_text(f"{json.dumps(line)}\n")
    OmegaConf.save(OmegaConf.create(as_plain(load_config([]))), RUN_DIR / "config.yaml")
    (RUN_DIR / "snapshots").rename("copy")


def move_away(hub) -> None:
    RUN_DIR.rename("away")


def another_run(hub) -> None:
    """A run of another id at step 10."""
    folder = runs.snapshot(Path("out/other"), 10)
    shutil.copytree(runs.snapshot(RUN_DIR, 10), folder)
    state = (folder / "state.json").read_text()
    (folder / "state.json").write_text(state.replace(read_state(folder).run_id, ANOTHER_RUN))
    seal(folder)


NEW, OTHER = "run.name=new", "run.name=other"
HERE, THERE = "hub.repo_id=me/run", "hub.repo_id=me/other"
EARLY = "snapshot.resume=out/mine/snapshots/step-00000010"
TAKEOVER = "name another store, or replace what this one holds with hub.takeover=true"
CONTINUE = "to continue the run in the store, give another run.name"
FOLLOWED = {
    "an earlier step": (
        nothing,
        f"run.name=mine {EARLY}",
        ("give it another run.name", nothing, f"{NEW} {EARLY}", 10),
        ("leave snapshot.resume out and remove the newer", remove_newer, "run.name=mine", 10),
    ),
    "a repo of another run": (
        another_run,
        f"{OTHER} {HERE}",
        (TAKEOVER, nothing, f"{OTHER} {THERE}", 10),
        (TAKEOVER, nothing, f"{OTHER} {HERE} hub.takeover=true", 10),
        (CONTINUE, nothing, f"run.name=third {HERE}", 30),
    ),
    "no whole snapshot here": (
        damage(10, 20, 30),
        "run.name=mine",
        ("or move out/mine away", move_away, "run.name=mine", None),
    ),
    "no Hub": (
        lambda hub: hub.down(),
        f"{NEW} {HERE}",
        ("a run that is new can begin without hub.repo_id", nothing, "run.name=third", None),
        ("Start again when it can be reached", lambda hub: hub.up(), f"{NEW} {HERE}", 30),
    ),
    "no snapshots": (
        lose_snapshots,
        "run.name=mine",
        (
            "Restore one from a copy",
            lambda hub: shutil.copytree("copy", RUN_DIR / "snapshots"),
            "run.name=mine",
            30,
        ),
        ("or move out/mine away", move_away, "run.name=mine", None),
    ),
}
"""By case: what has happened, a command that is refused, and how each advice in the sentence is
followed: what it asks for, and the command that follows it with the step that it begins after."""


@pytest.mark.parametrize("case", FOLLOWED)
def test_advice_is_followed(in_repo, a_run, begins, refused, case):
    happens, words, *advices = FOLLOWED[case]
    happens(in_repo)
    said = refused(words)
    for advice, then, corrected, step in advices:
        assert advice in said
        then(in_repo)
        assert begins(corrected) == step


ODD = {
    "data.block_size": "8",
    "data.documents": "masked",
    "optim.freeze": '["*.wte.*","*.h.0.*"]',
    "optim.name": "adamw",
    "model.n_head": "2",
}


def test_each_value_of_a_snapshot_is_given_as_a_shell_takes_it(finished_run):
    state = read_state(runs.snapshot(finished_run, 30))
    state.config = as_plain(load_config([f"{key}={value}" for key, value in ODD.items()]))
    now = load_config(["optim.name=muon"])
    with pytest.raises(OtherRun) as caught:
        refuse_other_run(state, as_plain(now), None)
    lines = [line.strip() for line in str(caught.value).splitlines() if line.startswith("  ")]
    given = [line.partition(" in the")[0].replace(": ", "=", 1) for line in lines]
    assert {word.partition("=")[0] for word in given} == ODD.keys()
    words = [word for line in given for word in shlex.split(line)]
    refuse_other_run(state, as_plain(load_config(words)), None)


@pytest.mark.slow
def test_what_the_end_of_a_run_advises(small, tmp_path):
    words = [*small, f"run.dir={tmp_path / 'my run'}", "train.max_steps=4", "run.tracker=null"]
    said = runs.train(*words).stdout
    (sample,) = re.findall(r"Generate text: +python (.+)", said)
    script, *arguments = shlex.split(sample)
    result = runs.run(runs.command(*arguments, script=script))
    assert (result.returncode, len(result.stdout) > 10) == (0, True), result.stderr
    (longer,) = re.findall(r"Continue training: the same command with (train\.max_steps=\d+)", said)
    again = runs.train(*words)
    assert "A larger train.max_steps extends it." in again.stdout
    runs.train(*words, longer, code=0)
    assert longer == "train.max_steps=8"
    assert len(runs.losses(tmp_path / "my run")) == 8
