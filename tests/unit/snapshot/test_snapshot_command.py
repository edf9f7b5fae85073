"""`python -m snapshot verify` and `list`, on folders (on repos: test_hub_resume.py)."""

from __future__ import annotations

import json
import shutil

import runs
from sealed import seal
from snapshot.__main__ import main


def look(what: str, place: object):
    return runs.run([*runs.MODULE, what, str(place)])


def test_a_whole_run_is_said_to_be_so_with_what_it_holds(finished_run):
    result = look("verify", finished_run)
    assert result.returncode == 0, result.stderr
    for part in (
        "step-00000030: whole, 7 files",
        "every hash right",
        "step      30, epoch 1, seed 1337",
        "2 layers, 2 heads, 32 wide, context 16, 34 characters",
        "nats per character",
        "logits    as transformers computes them, within ",
        "torch 2.13.0",
        "also whole:",
    ):
        assert part in result.stdout
    assert look("verify", runs.snapshot(finished_run, 20)).stdout.count("whole") == 1


def test_a_damaged_snapshot_is_named_and_the_exit_code_is_1(finished_run, tmp_path):
    run_dir = shutil.copytree(finished_run, tmp_path / "run")
    newest = runs.snapshot(run_dir, 30)
    with open(newest / "optimizer.safetensors", "r+b") as opened:
        opened.seek(-1, 2)
        last = opened.read(1)
        opened.seek(-1, 2)
        opened.write(bytes([last[0] ^ 1]))
    (runs.snapshot(run_dir, 20) / "state.json").unlink()
    result = look("verify", run_dir)
    assert result.returncode == 1
    assert "not whole: " in result.stderr
    assert "the content of optimizer.safetensors has changed" in result.stderr
    assert "state.json is missing" in result.stderr
    assert "step-00000010: whole" in result.stdout
    assert "Traceback" not in result.stderr


def test_a_list_has_a_line_each_newest_first(finished_run):
    result = look("list", finished_run)
    assert result.returncode == 0
    steps = [line.split()[1] for line in result.stdout.splitlines()]
    assert steps == ["30", "20", "10"]
    assert "bytes" in result.stdout


def test_what_is_no_snapshot_gets_a_sentence(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("nothing")
    for what, place, code, words in (
        ("list", tmp_path / "none", 2, "is neither a folder that exists nor"),
        ("list", tmp_path, 1, "not whole: "),
        ("verify", tmp_path, 1, "is not a snapshot: it has no manifest.json"),
    ):
        assert main([what, str(place)]) == code
        assert words in capsys.readouterr().err
    (tmp_path / "snapshots").mkdir()
    assert main(["verify", str(tmp_path)]) == 1
    assert "is a run's directory that has no snapshot yet" in capsys.readouterr().err


def test_what_stands_in_a_snapshot_never_acts_on_the_terminal(finished_run, tmp_path, capsys):
    folder = shutil.copytree(runs.snapshot(finished_run, 30), tmp_path / "step-00000030")
    state = json.loads((folder / "state.json").read_text())
    state["config"]["run"]["name"] = "\x1b]0;owned\x07\nsnapshot  fake: whole"
    state["versions"] = {"torch\x1b[2J": "2\r"}
    (folder / "state.json").write_text(json.dumps(state))
    seal(folder)
    assert main(["verify", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert shown.replace("\n", "").isprintable()
    assert r"run       \x1b]0;owned\x07\nsnapshot  fake: whole, " in shown
    assert r"torch\x1b[2J 2\r" in shown
