"""`python -m snapshot status` says how far the run in a store is."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

import hubs
import runs
from snapshot.__main__ import main
from store.kinds import open_store

RUN, ATTEMPT = "1" * 32, "a" * 32


def test_the_status_of_a_store(finished_run, tmp_path, capsys, monkeypatch):
    """Of a folder; that each kind of store has one: test_stores."""
    url = f"file://{tmp_path}"
    monkeypatch.setattr("store.attempt.platform.node", lambda: "my laptop|")
    store = open_store(url, 5.0)
    assert main(["status", url]) == 2
    assert "holds no run. Check the name." in capsys.readouterr().err
    uploads = hubs.uploader(store, run_id=RUN, attempt_id=ATTEMPT)
    hubs.upload_each(uploads, runs.snapshot(finished_run, 10))
    assert main(["status", url]) == 0
    said = capsys.readouterr().out
    assert "run       11111111 in " in said
    assert "attempt   aaaaaaaa, generation 1" in said
    assert "machine   my laptop|\n" in said
    assert "step      10 is the newest there" in said
    assert "Z, by the clock of that machine" in said


@pytest.mark.parametrize("words", [["status", "nothing/here/at/all"], ["status"], ["status", "."]])
def test_a_status_of_nothing_is_a_mistake(words, capsys):
    with pytest.raises(SystemExit) if len(words) == 1 else nullcontext():
        assert main(words) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_folder_of_a_run_is_no_store(finished_run, capsys):
    assert main(["status", str(finished_run)]) == 2
    assert "is a folder, and status is that of a store. The newest line of metrics.jsonl" in (
        capsys.readouterr().err
    )
