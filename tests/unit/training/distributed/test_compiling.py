"""Compiling, where the accelerate config file asks for it: done where it pays, or said why not."""

from __future__ import annotations

import re
import shutil

import pytest

import runs
from config.compose import load_config
from training.distributed.accelerator import dynamo_plugin_for, why_not_compiled


@pytest.mark.parametrize(
    ("backend", "processes", "max_steps", "forced", "compilers", "reason"),
    [
        ("INDUCTOR", "1", 10**6, "false", {"g++"}, None),
        ("inductor", "1", 10**6, "false", {"clang++"}, None),
        ("INDUCTOR", "1", 2000, "false", {"g++"}, "this run takes 3e13 operations per process"),
        ("INDUCTOR", "1", 2000, "true", {"g++"}, None),
        ("INDUCTOR", "4000", 10**6, "false", {"g++"}, "4e12 operations per process"),
        ("INDUCTOR", "1", 10**6, "false", set(), r"no compiler \(g\+\+ or clang\+\+\)"),
        ("AOT_EAGER", "1", 2000, "false", set(), None),
        ("NO", "1", 2000, "false", set(), None),
    ],
)
def test_a_run_is_compiled_where_that_pays(
    monkeypatch, backend, processes, max_steps, forced, compilers, reason
):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", backend)
    monkeypatch.setenv("WORLD_SIZE", processes)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in compilers else None)
    words = ["data.block_size=256", f"train.max_steps={max_steps}"]
    config = load_config([*words, f"run.compile_short_runs={forced}"])

    found = why_not_compiled(config)

    assert (found is None) == (reason is None)
    if reason is None:
        assert dynamo_plugin_for(config) is None
    else:
        assert re.search(reason, found)
        assert dynamo_plugin_for(config).backend == "NO"


def test_a_short_run_says_that_it_is_not_compiled(small, tmp_path):
    path = runs.rehearsal("ddp.yaml", tmp_path, 2)  # which asks for it
    words = [*small, "train.max_steps=2", f"run.dir={tmp_path / 'run'}"]

    result = runs.launch(path, *words)

    assert result.returncode == 0, result.stderr
    (machine,) = (line for line in result.stdout.splitlines() if line.startswith("machine"))
    assert "compiled" not in machine
    assert (
        result.stdout.count("hint      not compiled, although the accelerate config file asks") == 1
    )


@pytest.mark.parametrize("key", ["pretrained", "architecture"])
def test_a_model_of_the_hub_is_compiled_only_on_request(monkeypatch, key):
    """Its size is in no key, so that of `model=tiny` would be taken for it."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    monkeypatch.setattr(shutil, "which", lambda name: name)
    words = [f"model.{key}=owner/name", "train.max_steps=1000000"]
    assert "size of the model, and so the gain, is unknown" in why_not_compiled(load_config(words))
    assert why_not_compiled(load_config([*words, "run.compile_short_runs=true"])) is None
