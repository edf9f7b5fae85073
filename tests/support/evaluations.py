"""What evaluate.py reports, beside what the run has recorded."""

from __future__ import annotations

import json
import math
import shutil

import pytest

import runs
from sealed import seal
from snapshot.disk.folder import read_json

T = 16


def reported(run_dir) -> dict:
    """The newest evaluation that a run has recorded."""
    return runs.metrics(run_dir, "eval")[-1]


def assert_as_reported(found: dict, run_dir) -> None:
    record = reported(run_dir)
    assert found["step"] == record["step"]
    assert found["loss"] == pytest.approx(record["loss"], abs=1e-6)
    assert found["bits_per_byte"] == pytest.approx(record["bits_per_byte"], abs=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(record["loss"]), rel=1e-6)
    assert found["held_out"]


def changed(run_dir, folder, **data: object):
    """A copy of a snapshot whose state has other values in `data`, and a manifest that fits."""
    copy = shutil.copytree(runs.snapshot(run_dir, 30), runs.snapshot(folder / "changed", 30))
    shutil.copy(run_dir / "config.yaml", folder / "changed")  # it says where the text lies
    state = read_json(copy / "state.json")
    state["config"]["data"] |= data
    (copy / "state.json").write_text(json.dumps(state))
    seal(copy)
    return copy
