"""trace.py: one trace of all processes, and a table of what a step sends."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import runs

SMALL = ["model.n_layer=2", "train.micro_batch_size=3", "optim.name=adamw"]
"""Two micro-batches of three sequences on each of two processes."""
WEIGHTS = 4 * (103 * 128 + 64 * 128 + 2 * (12 * 128**2 + 13 * 128) + 2 * 128)
"""Bytes in float32: both embeddings, two blocks, and the last normalisation."""


def trace(config: str | Path, folder: Path, *words: str) -> tuple[dict, list[dict]]:
    """The printed calls and bytes by kind, and the events of trace.json."""
    run_dir = folder / "run"
    command = runs.launch_command(
        config, f"run.dir={run_dir}", *words, script=runs.ROOT / "trace.py"
    )
    result = runs.run(command)
    assert result.returncode == 0, result.stderr
    assert not run_dir.exists()  # a trace leaves the run alone
    assert not re.search(r"^(USDT|STAGE):", result.stdout + result.stderr, re.MULTILINE)
    traced = folder / "run-trace"
    assert f"trace     {traced / 'trace.json'}, for https://ui.perfetto.dev" in result.stdout
    assert [path.name for path in traced.glob("*.json")] == ["trace.json"]  # and no parts of it
    rows = re.findall(r"^(\S+) +([\d,]+) +([\d,]+)$", result.stdout, re.MULTILINE)
    found = {kind: tuple(int(one.replace(",", "")) for one in rest) for kind, *rest in rows}
    return found, json.loads((traced / "trace.json").read_text())["traceEvents"]


def test_ddp_sends_its_gradients_once_a_step(tmp_path):
    rows, events = trace("ddp_cpu.yaml", tmp_path, *SMALL)
    calls, size = rows["all-reduce"]
    agreed = size - WEIGHTS  # of all processes, whether the run stops
    assert 0 <= agreed < 1000
    assert 1 <= calls <= 4
    steps = [one for one in events if re.fullmatch(r"step \d", one.get("name", ""))]
    assert len({one["pid"] for one in steps}) == 2
    assert sorted(one["name"] for one in steps) == sorted(2 * ["step 1", "step 2", "step 3"])


@pytest.mark.thorough
def test_fsdp_sends_weights_and_gradients_in_each_micro_batch(tmp_path):
    rows, _ = trace("fsdp_cpu.yaml", tmp_path, *SMALL)
    blocks = 2 * 4 * (12 * 128**2 + 13 * 128)  # gathered again for the backward pass
    assert rows["all-gather"][1] == pytest.approx(2 * (WEIGHTS + blocks), rel=0.001)
    assert rows["reduce-scatter"][1] == pytest.approx(2 * WEIGHTS, rel=0.001)  # with padding


@pytest.mark.slow
def test_fsdp_sends_weights_and_gradients_once_a_step_by_a_key(tmp_path):
    rows, _ = trace("fsdp_cpu.yaml", tmp_path, *SMALL, "run.sync_each_micro_batch=false")
    for kind in ("all-gather", "reduce-scatter"):
        assert rows[kind][1] == pytest.approx(WEIGHTS, rel=0.001)


def test_one_process_sends_nothing(tmp_path):
    rows, events = trace("cpu.yaml", tmp_path, *SMALL)
    assert rows == {}
    assert any(one.get("name", "").startswith("aten::") for one in events)
