"""The rooms and their arrows, read from the imports."""

from __future__ import annotations

import ast
import re

import pytest

from runs import ROOT

ROOMS = ("model", "data", "config", "training", "snapshot", "planning")
MAY_KNOW = {
    "model": {"model"},
    "data": {"data"},
    "config": {"config", "model", "data"},
    "snapshot": {"snapshot", "model", "data"},
    "training": {"training", "snapshot", "config", "model", "data"},
    "planning": {"planning", "training", "snapshot", "config", "model", "data"},
}
MAY_NOT_IMPORT = {
    "model": {"hydra", "omegaconf", "accelerate", "huggingface_hub", "datasets", "numpy"},
    "data": {"hydra", "omegaconf", "accelerate", "huggingface_hub"},
    "snapshot": {"hydra", "omegaconf"},
    "config": {"accelerate"},
    "training": set(),
    "planning": set(),
}
SOURCES = [
    path
    for room in ("", *ROOMS)
    for path in sorted((ROOT / room).glob("**/*.py" if room else "*.py"))
    if room or path.name in ("train.py", "sample.py", "plan.py")
]


def imported(path) -> set[str]:
    """The full names of what a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_point_one_way(room):
    for path in (ROOT / room).rglob("*.py"):
        tops = {name.split(".")[0] for name in imported(path)}
        assert tops & set(ROOMS) <= MAY_KNOW[room], path
        assert not tops & MAY_NOT_IMPORT[room], path
        assert not tops & {"train", "sample", "plan"}, path


def test_model_needs_torch_and_nothing_else():
    third_party = {"accelerate", "datasets", "numpy", "safetensors", "tokenizers", "transformers"}
    for path in (ROOT / "model").glob("*.py"):
        assert not {name.split(".")[0] for name in imported(path)} & third_party


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nobody_asks_for_ranks_or_talks_to_the_others_past_the_accelerator(path):
    # peers.py finds the others and waits for them; those of the planner do not exist.
    if path.name not in ("sharded.py", "timeouts.py", "rendezvous.py", "fake_trace.py"):
        assert not [n for n in imported(path) if n.startswith("torch.distributed")]
        assert "torch.distributed" not in path.read_text()
    if path.name != "environment.py":
        assert not re.search(r"\benviron\b|\bgetenv\b", path.read_text())


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_promise_5_nothing_is_pickled(path):
    """Promise 5: no pickle is written or read."""
    names = {name.split(".")[0] for name in imported(path)}
    assert not names & {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    for forbidden in (r"torch\.(load|save)\b", r"\b(save|load)_state\(", r"allow_pickle"):
        assert not re.search(forbidden, path.read_text())


def test_no_file_of_the_project_is_too_long_to_read():
    for path in SOURCES:
        assert len(path.read_text().splitlines()) <= 300, path
