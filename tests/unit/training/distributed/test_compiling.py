"""Compiling: done where the accelerate config file asks for it, unless there is no compiler."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

import runs
from training.distributed.accelerator import why_not_compiled


@pytest.mark.parametrize(
    ("backend", "compilers", "reason"),
    [
        ("INDUCTOR", {"g++"}, None),
        ("inductor", {"clang++"}, None),
        ("INDUCTOR", set(), r"no compiler \(g\+\+ or clang\+\+\)"),
        ("AOT_EAGER", set(), None),
        ("NO", set(), None),
    ],
)
def test_what_the_config_file_says_is_compiled(monkeypatch, backend, compilers, reason):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", backend)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in compilers else None)

    found = why_not_compiled()

    assert (found is None) == (reason is None)
    assert reason is None or re.search(reason, found)


def test_a_run_without_a_compiler_says_that_it_is_not_compiled(small, tmp_path):
    path = runs.rehearsal("ddp.yaml", tmp_path, 2, dynamo_backend="INDUCTOR")
    words = [*small, "train.max_steps=2", f"run.dir={tmp_path / 'run'}"]

    result = runs.launch(path, *words, PATH=str(Path(sys.executable).parent), CXX="")

    assert result.returncode == 0, result.stderr
    (machine,) = (line for line in result.stdout.splitlines() if line.startswith("machine"))
    assert "compiled" not in machine
    assert (
        result.stdout.count("hint      not compiled, although the accelerate config file asks") == 1
    )
