"""`python -m snapshot verify` and `list`, on folders (on repos: test_promise_hub_resume.py)."""

from __future__ import annotations

import shutil

import runs


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
        "AdamW",
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


def test_what_is_no_snapshot_gets_a_sentence(tmp_path):
    assert look("list", tmp_path / "none").returncode == 2
    empty = look("verify", tmp_path)
    assert empty.returncode == 1
    assert "is no snapshot: it has no manifest.json" in empty.stderr
