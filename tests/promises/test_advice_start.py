"""Each advice about a run's folder, other runs, buckets and models works: it is followed here."""

from __future__ import annotations

import re
import shlex
import shutil
from io import BytesIO
from pathlib import Path

import pytest

import runs
from config.compose import load_config
from config.schema import ConfigError
from config.stored import as_plain
from sealed import seal
from snapshot.base import open_base
from snapshot.disk.state import read_state
from snapshot.errors import OtherRun, SnapshotError
from snapshot.named_model import merge
from store.errors import StoreError
from store.file_system import Bucket
from training.run import start
from training.run.run_dir import RunLock, refuse_foreign
from training.run.same_run import refuse_other_run

BUCKET = "hub.url=hf://buckets/me/run"


@pytest.fixture
def begins(small, tmp_path, monkeypatch):
    """The step that a command with these words begins after; None at the beginning."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("training.run.run_dir.NOTICE_SECONDS", 0.1)
    monkeypatch.setattr("training.run.run_dir.WAIT_SECONDS", 0.2)

    def begun(*words: str) -> int | None:
        config = load_config([*small, "hub.timeout_seconds=5", *words])
        lock, run_dir = RunLock(), Path(config.run.dir)
        refuse_foreign(run_dir)
        lock.acquire(run_dir)
        try:
            state = start._choose(config, lock).state
        finally:
            lock.release()
        return None if state is None else state.step

    return begun


@pytest.fixture
def refused(begins):
    """The sentence with which it is refused."""

    def sentence(*words: str) -> str:
        with pytest.raises((ConfigError, SnapshotError, StoreError)) as caught:
            begins(*words)
        return str(caught.value)

    return sentence


def of_another_run(finished_run, folder: Path) -> Path:
    """A snapshot of step 10 with the id of another run."""
    shutil.copytree(runs.snapshot(finished_run, 10), folder)
    state = (folder / "state.json").read_text()
    (folder / "state.json").write_text(state.replace(read_state(folder).run_id, "f" * 32))
    seal(folder)
    return folder


def test_of_another_configuration(a_run, begins, refused):
    said = refused("run.name=mine", "model.n_layer=1", "train.seed=7")
    lines = [line.split(": ") for line in said.splitlines() if line.startswith("  ")]
    words = [f"{key.strip()}={values.partition(' in the')[0]}" for key, values in lines]
    assert words == ["model.n_layer=2", "train.seed=1337"]
    assert "Restore these values, or give the new run another run.name" in said
    assert begins("run.name=mine", *words) == 30
    assert begins("run.name=new", "model.n_layer=1", "train.seed=7") is None
    assert "set model.pretrained=<this run or repo>" in said
    assert open_base("model.pretrained", str(a_run), 5.0).key == f"model.pretrained={a_run}"


ODD = {
    "data.block_size": "8",
    "data.documents": "masked",
    "model.activation_function": "gelu_new",
    "optim.freeze": '["*.wte.*","*.h.0.*"]',
    "optim.name": "adamw",
    "train.global_batch_size": "6",
    "model.n_head": "2",
}


def test_each_value_of_a_snapshot_is_given_as_a_shell_takes_it(finished_run):
    state = read_state(runs.snapshot(finished_run, 30))
    state.config = as_plain(load_config([f"{key}={value}" for key, value in ODD.items()]))
    now = load_config(["optim.name=muon"])
    with pytest.raises(OtherRun) as caught:
        refuse_other_run(state, as_plain(now), None)
    lines = [line.strip() for line in str(caught.value).splitlines() if line.startswith("  ")]
    keys = {line.partition(": ")[0]: line for line in lines}
    assert keys.keys() == ODD.keys()
    words = [
        word
        for key, line in keys.items()
        for word in shlex.split(f"{key}={line.partition(': ')[2].partition(' in the')[0]}")
    ]
    refuse_other_run(state, as_plain(load_config(words)), None)


def test_a_folder_with_files_of_somebody_else(begins, refused, tmp_path):
    (folder := tmp_path / "out" / "mine").mkdir(parents=True)
    (folder / "curves.png").write_text("mine")
    said = refused("run.name=mine")
    assert "Give the run a folder of its own, or move curves.png away" in said
    assert begins("run.name=mine", "run.dir=out/own") is None
    (folder / "curves.png").rename(tmp_path / "curves.png")
    assert begins("run.name=mine") is None


def test_a_folder_in_use_or_not_to_be_written(a_run, begins, refused, tmp_path):
    lock = RunLock()
    lock.acquire(a_run)
    said = refused("run.name=mine")
    assert "Wait for it or stop it, or give this run another run.name" in said
    assert begins("run.name=new") is None
    lock.release()
    assert begins("run.name=mine") == 30
    (tmp_path / "file").write_text("")
    assert "Set run.dir to a folder that you may write to" in refused("run.dir=file/run")
    assert begins("run.dir=out/third") is None


def in_bucket(hub, name: str, snapshot: Path | None, private: bool = True) -> None:
    """A bucket with a snapshot, or with notes."""
    bucket = hub.create_bucket(name, private)
    content = Bucket(f"hf://buckets/{name}", 5.0)
    files = {"notes.txt": Path(__file__)}
    if snapshot is not None:
        place = f"snapshots/step-00000010-{'a' * 8}"
        files = {f"{place}/{path.name}": path for path in snapshot.iterdir()}
    for path, source in files.items():
        content.write(path, BytesIO(source.read_bytes()))
    assert bucket.files


@pytest.mark.thorough
@pytest.mark.parametrize("near_hub", ["Xet"], indirect=True)
def test_a_bucket_of_another_run(near_hub, a_run, begins, refused, finished_run, tmp_path):
    in_bucket(near_hub, "me/run", of_another_run(finished_run, tmp_path / "other"))
    said = refused("run.name=mine", BUCKET)
    assert "name another store, or replace what this one holds with hub.takeover=true" in said
    assert begins("run.name=mine", "hub.url=hf://buckets/me/other") == 30
    assert begins("run.name=mine", BUCKET, "hub.takeover=true") == 30
    assert "to continue the run in the store, give another run.name" in said
    assert begins("run.name=third", BUCKET) == 10
    named = "snapshot.resume=hf://buckets/me/run"
    assert begins("run.name=fifth", "hub.url=hf://buckets/me/fifth", named) == 10


@pytest.mark.parametrize("near_hub", ["Xet"], indirect=True)
def test_a_bucket_of_something_else_or_public(near_hub, begins, refused):
    in_bucket(near_hub, "me/run", None)
    assert "Name one that is new or empty" in refused("run.name=new", BUCKET)
    assert begins("run.name=new", "hub.url=hf://buckets/me/new") is None
    near_hub.create_bucket("me/public", private=False)
    said = refused("run.name=public", "hub.url=hf://buckets/me/public")
    assert "Make it private, name another, or allow it with hub.private=false" in said
    assert begins("run.name=public", "hub.url=hf://buckets/me/public", "hub.private=false") is None
    assert begins("run.name=public", "hub.url=hf://buckets/me/another") is None


def test_what_is_not_to_be_merged(a_run, tmp_path):
    with pytest.raises(SnapshotError, match="is whole already: transformers loads it as it is"):
        merge(str(a_run), tmp_path / "merged")
    assert (runs.snapshot(a_run, 30) / "config.json").is_file()
    open_base("model.pretrained", str(a_run), 5.0).fetch_weights()


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
    result = runs.train(*words, longer)
    assert result.returncode == 0, result.stderr
    assert longer == "train.max_steps=8"
    assert len(runs.losses(tmp_path / "my run")) == 8
