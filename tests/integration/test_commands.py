"""What every command that prints does when whoever reads its output leaves."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import preload
import runs
from stream_data import TEXTS, lines_of

COMMANDS = {
    "plan": runs.command("model=tiny", "--memory=24", "--device=cpu", script="plan.py"),
    "sample": runs.command("{run}", "--length=5", script="sample.py"),
    "evaluate": runs.command("{run}", "--json", script="evaluate.py"),
    "snapshot list": [*runs.MODULE, "list", "{run}"],
    "snapshot verify": [*runs.MODULE, "verify", "{run}/snapshots/step-00000010"],
    "config.help": [sys.executable, "-m", "config.help"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_reader_that_leaves_gets_no_traceback(name, finished_run, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(lines_of(TEXTS))
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as left:
        process = preload.Process(
            [word.format(run=finished_run, rows=rows) for word in COMMANDS[name]],
            stdout=left,
            stderr=subprocess.PIPE,
            cwd=runs.ROOT,
            env=runs.environment(),
        )
    _, errors = process.communicate(timeout=runs.DEADLINE_SECONDS)
    assert (errors.decode(), process.returncode) == ("", 141)
