"""Nothing that is uploaded says where the user's files lie, and a resume needs none of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

import hubs
import runs
from config.compose import load_config
from data.public_names import public_name, public_resume
from snapshot.disk.state import read_state
from snapshot.named_model import find_model
from training.reporting.console import Events
from training.reporting.metrics import MetricsFile, read_events
from training.run.records import _places

SECRET = "Zebra Clinic"


def uploaded(hub, repo_id: str) -> dict[str, bytes]:
    """All that every commit of a repo has, by path."""
    repo = hub.repo(repo_id)
    found = {}
    for commit in repo.every_head:
        for path in repo.files(commit):
            found[f"{commit}/{path}"] = repo.read(commit, path)
    return found


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
    changes = [line for line in result.stdout.splitlines() if line.startswith("changed ")]
    assert changes == ["changed   train.max_steps: 20 -> 30"]
    files = uploaded(hub, hubs.REPO)
    assert any(path.endswith("/state.json") for path in files)
    assert any(path.endswith("/metrics.jsonl") for path in files)
    places = [SECRET, "another place", "my models", str(tmp_path), str(tmp_path.parent)]
    saying = [
        (path, place)
        for path, content in files.items()
        for place in places
        if place.encode() in content
    ]
    assert saying == []
    state = read_state(runs.snapshot(there / "my run", 30)).config
    assert state["data"]["source"] == "my text.txt"
    # Adapters lie around a base, which is a folder that only this machine's user knows.
    assert find_model(str(there / "my run"), str(base) if more else None).load() is not None


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("/home/me/My Texts/a.txt", "a.txt"),
        ("my texts/all", "all"),
        ("texts/*.jsonl", "*.jsonl"),
        ("~/x", "x"),
        ("file:///home/me/a.txt", "a.txt"),
        ("python-docs", "python-docs"),
        ("bpe:8000", "bpe:8000"),
        ("owner/name", "owner/name"),
        ("owner/name@refs/pr/1", "owner/name@refs/pr/1"),
        ("hf://datasets/a/b/c.parquet", "hf://datasets/a/b/c.parquet"),
    ],
)
def test_a_name_is_shown_without_its_folders(source, shown):
    assert public_name(source) == shown


def test_two_snapshots_of_one_name_are_told_apart():
    one, other = public_resume("/a/step-00000010"), public_resume("/b/step-00000010")
    assert one != other
    assert one == public_resume("/a/step-00000010")
    assert "step-00000010" in one
    assert public_resume("auto") == "auto"


EVENTS = [
    ("hub.url", "file://PLACE/my run has no room left: 'PLACE/my run/.part'", "my run has no "),
    ("snapshot.resume", "file://PLACE/my run cannot be reached", "my run cannot be reached"),
    ("data.source", "PLACE/my run is gone; see docs/hub.md", "my run is gone; see hub.md"),
    ("run.dir", "PLACE/my run/a.jsonl cannot be written, nor PLACE/x", "a.jsonl cannot be written"),
    ("HF_HOME", "Permission denied: 'PLACE/my run/models--me'", "denied: 'models--me'"),
    ("HF_XET_CACHE", "no room in PLACE/my run/x", "no room in x"),
    ("HF_TOKEN_PATH", "PLACE/my run cannot be read", "my run cannot be read"),
]


@pytest.mark.parametrize(("key", "text", "shown"), EVENTS)
def test_events_name_no_folder(tmp_path, monkeypatch, key, text, shown):
    """Of the user's, of a store or of the Hub's client."""
    place = tmp_path / SECRET
    words = [f"run.dir={tmp_path / 'run'}"]
    if key.startswith("HF_"):
        monkeypatch.setattr(constants, key, str(place / "my run"))
    else:
        address = "file://" if key != "run.dir" else ""
        words.append(f'{key}="{address}{place}/my run"')
    assert shown in event_of(load_config(words), text.replace("PLACE", str(place)), tmp_path)
    assert not any(word in (tmp_path / "metrics.jsonl").read_text() for word in SECRET.split())


def event_of(config, text: str, folder: Path) -> str:
    """A warning as metrics.jsonl has it."""
    Events(MetricsFile(folder / "metrics.jsonl", 0), "0" * 32, _places(config)).add(
        "warning", 1, text
    )
    (event,) = read_events(folder / "metrics.jsonl")
    return event["text"]


def test_a_user_without_a_home_has_events(tmp_path, monkeypatch):
    """As a container runs with any user: the Hub's folders then begin with a `~`."""

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr(constants, "HF_HOME", "~/.cache/huggingface")
    config = load_config([f"run.dir={tmp_path}"])
    said = event_of(config, "~/.cache/huggingface/token cannot be read", tmp_path)
    assert said == "token cannot be read"


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
