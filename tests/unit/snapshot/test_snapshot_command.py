"""`python -m snapshot verify` and `list`, on folders (on repos: test_hub_resume.py)."""

from __future__ import annotations

import json
import shutil

import pytest

import runs
from sealed import seal
from snapshot.__main__ import main


@pytest.fixture
def look(capsys):
    """The exit code of a command, what it prints, and what it complains about."""

    def printed(what: str, place: object) -> tuple[int, str, str]:
        code = main([what, str(place)])
        output = capsys.readouterr()
        return code, output.out, output.err

    return printed


def test_a_whole_run_and_a_damaged_one_are_told_apart(finished_run, look, tmp_path):
    code, said, complaints = look("verify", finished_run)
    assert (code, complaints) == (0, "")
    assert "step-00000030: whole, 7 files" in said
    assert said.count("every hash right; run text.txt") == 3
    code, said, _ = look("list", finished_run)
    assert code == 0
    assert [line.split()[1] for line in said.splitlines()] == ["30", "20", "10"]
    run_dir = shutil.copytree(finished_run, tmp_path / "run")
    (runs.snapshot(run_dir, 30) / "optimizer.safetensors").write_bytes(b"other")
    (runs.snapshot(run_dir, 20) / "state.json").unlink()
    code, said, complaints = look("verify", run_dir)
    assert code == 1
    assert said.count(": whole") == said.count("step-00000010: whole") == 1
    for part in ("not whole: ", "optimizer.safetensors has 5 bytes", "json is missing"):
        assert part in complaints


def test_what_is_no_snapshot_gets_a_sentence(tmp_path, look):
    (tmp_path / "notes.txt").write_text("nothing")
    for what, place, code, words in (
        ("list", tmp_path / "none", 2, "is neither a folder that exists nor"),
        ("list", tmp_path, 1, "not whole: "),
        ("verify", tmp_path, 1, "is not a snapshot: it has no manifest.json"),
    ):
        found, _, complaints = look(what, place)
        assert found == code
        assert words in complaints


def test_what_stands_in_a_snapshot_never_acts_on_the_terminal(finished_run, look, tmp_path):
    folder = shutil.copytree(runs.snapshot(finished_run, 30), tmp_path / "step-00000030")
    state = json.loads((folder / "state.json").read_text())
    state["config"]["run"]["name"] = "\x1b]0;owned\x07\nsnapshot  fake: whole"
    (folder / "state.json").write_text(json.dumps(state))
    seal(folder)
    code, said, _ = look("verify", folder)
    assert code == 0
    assert said.replace("\n", "").isprintable()
    assert r"run \x1b]0;owned\x07\nsnapshot  fake: whole, " in said
