"""Nothing that is uploaded says where the user's files lie, and a resume needs none of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import hubs
import runs
from data.public_names import public_name, public_resume
from snapshot.disk.state import read_state
from snapshot.named_model import find_model

SECRET = "Zebra Clinic"


def uploaded(hub, repo_id: str) -> dict[str, bytes]:
    """All that every commit of a repo has, by path."""
    repo = hub.repo(repo_id)
    files = [(commit, path) for commit in repo.every_head for path in repo.files(commit)]
    return {f"{commit}/{path}": repo.read(commit, path) for commit, path in files}


def words_at(place: Path, small: list[str], base: Path, *more: str) -> list[str]:
    """A run of which everything lies in a folder, which has a space in its name."""
    kept = [word for word in small if not word.startswith(("data.", "model."))]
    return [
        *kept,
        *hubs.words(place / "my run"),
        f"data.source={place / 'my text.txt'}",
        f"data.cache_dir={place / 'my cache'}",
        f"model.pretrained={base}",
        "data.block_size=16",
        *more,
    ]


def made_at(place: Path, text_file: Path, finished_run: Path) -> Path:
    """The user's files in a folder; the model to begin from."""
    (place / "my models").mkdir(parents=True)
    shutil.copyfile(text_file, place / "my text.txt")
    return shutil.copytree(runs.snapshot(finished_run, 30), place / "my models" / "the base")


@pytest.mark.parametrize(
    "more",
    [(), pytest.param(("optim.name=adamw", "model.lora_rank=2"), marks=pytest.mark.slow)],
    ids=["whole", "adapters"],
)
def test_no_uploaded_file_names_a_folder(finished_run, text_file, small, tmp_path, hub, more):
    here, there = tmp_path / SECRET, tmp_path / "another place"
    base = made_at(here, text_file, finished_run)
    first = words_at(here, small, base, "train.max_steps=20", *more)
    runs.train(*first, **hub.environment(), code=0)
    shutil.rmtree(here)
    base = made_at(there, text_file, finished_run)
    again = words_at(there, small, base, "train.max_steps=30", *more)
    result = runs.train(*again, **hub.environment(), code=0)
    assert f"fetched from {hubs.REPO}@" in result.stdout
    assert result.stdout.count("\nchanged ") == 1  # train.max_steps
    files = uploaded(hub, hubs.REPO)
    assert any(path.endswith("/state.json") for path in files)
    assert any(path.endswith("/metrics.jsonl") for path in files)
    places = [SECRET, "another place", "my models", str(tmp_path), str(tmp_path.parent)]
    assert not any(place.encode() in content for content in files.values() for place in places)
    state = read_state(runs.snapshot(there / "my run", 30)).config
    assert state["data"]["source"] == "my text.txt"
    # Adapters lie around a base, which is a folder that only this machine's user knows.
    assert find_model(str(there / "my run"), str(base) if more else None).load() is not None


def test_a_name_is_shown_without_its_folders():
    for source, shown in {
        "/home/me/My Texts/a.txt": "a.txt",
        "texts/*.jsonl": "*.jsonl",
        "~/x": "x",
        "file:///home/me/a.txt": "a.txt",
        "bpe:8000": "bpe:8000",
        "owner/name@refs/pr/1": "owner/name@refs/pr/1",
        "hf://datasets/a/b/c.parquet": "hf://datasets/a/b/c.parquet",
    }.items():
        assert public_name(source) == shown
    one, other = public_resume("/a/step-00000010"), public_resume("/b/step-00000010")
    assert one != other
    assert "step-00000010" in one
    assert public_resume("auto") == "auto"


NAMELESS = """
import pwd

def unknown(_):
    raise KeyError("uid not found")

pwd.getpwuid = unknown
"""


@pytest.mark.parametrize("backend", ["NO", pytest.param("INDUCTOR", marks=pytest.mark.slow)])
def test_a_user_without_a_name_and_a_home_trains(small, tmp_path, backend):
    """As a container runs with any user; torch's compiler names its cache after the user."""
    (tmp_path / "sitecustomize.py").write_text(NAMELESS)
    file = runs.rehearsal("cpu.yaml", tmp_path, 1, dynamo_backend=backend)
    words = runs.launch_command(file, *small, "train.max_steps=1", f"run.dir={tmp_path / 'run'}")
    unset = ("env", *(f"--unset={name}" for name in ("HOME", "USER", "LOGNAME", "LNAME")))
    result = runs.run([*unset, *words], forked=False, PYTHONPATH=str(tmp_path), code=0)
    assert "Traceback" not in result.stderr
    assert (tmp_path / "run/snapshots/step-00000001/manifest.json").is_file()
