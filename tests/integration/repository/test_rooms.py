"""The rooms and their arrows, read from the source; what train.py and every file may hold."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from runs import ROOT
from tracked import SOURCES, name_of, tracked

# What each room may import besides itself. A leaf is one file that a room above it may import too.
ARROWS = {
    "common": set(),
    "model": set(),
    "optim": {"model/sharded"},
    # Sources are read by one package, prepared and streamed.
    "data": {"data/reading"},
    "data/reading": {"data/chunks", "data/columns", "data/errors", "data/progress"},
    "data/streaming": {"data", "data/reading"},
    "config": {"model", "optim", "data"},
    "snapshot/disk": {"model", "optim", "data", "snapshot/errors", "snapshot/config_values"},
    "store": {"model", "data", "snapshot/disk", "snapshot/errors", "snapshot/config_values"},
    # Its command makes the page, and says what is gone.
    "snapshot": {"model", "data", "snapshot/disk", "store", "browser/space", "config/removed"},
    "browser": {"model", "data", "snapshot", "store"},
    # The errors of other rooms decide the exit code that all processes agree on.
    "training/distributed": {
        "model",
        "config",
        "optim/optimizers",
        "training/exits",
        "data/errors",
        "data/split",
        "snapshot/errors",
        "store/errors",
    },
    "training": {"model", "optim", "data", "config", "snapshot", "store", "training/distributed"},
    "training/reporting": {
        "model",
        "data",
        "config",
        "snapshot",
        "store",
        "training",
        "training/distributed",
    },
    "training/run": {
        "model",
        "data",
        "config",
        "snapshot",
        "store",
        "training",
        "training/distributed",
        "training/reporting",
    },
    "planning": {"model", "optim", "config", "snapshot", "training", "data/split"},
    "tracing": {"config", "training", "snapshot/disk/folder"},
    "proving": {"model", "data", "config", "snapshot", "store", "training"},
    "cloud": {"training/exits"},
}
ROOMS = tuple(ARROWS)
TOPS = {room.split("/")[0] for room in ROOMS}
MAY_NOT_IMPORT = {
    "common": {"hydra", "omegaconf", "accelerate", "torch"},
    "model": {"hydra", "omegaconf", "accelerate", "huggingface_hub", "datasets", "numpy"},
    "optim": {"hydra", "omegaconf", "accelerate", "huggingface_hub", "datasets", "numpy"},
    "data": {"hydra", "omegaconf", "accelerate", "huggingface_hub"},
    "data/reading": {"hydra", "omegaconf", "accelerate"},  # it asks the Hub for files
    "data/streaming": {"hydra", "omegaconf", "accelerate", "huggingface_hub"},
    "config": {"accelerate"},
    "snapshot": {"hydra", "omegaconf"},
    "snapshot/disk": {"hydra", "omegaconf", "huggingface_hub"},
    "store": {"hydra", "omegaconf"},
}
BENCHMARKS = tracked("benchmarks", ".py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path) -> set[str]:
    """The full names of what a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@cache
def known_files(path: Path) -> frozenset[Path]:
    """The files of the project that a file imports. Benchmarks name their neighbours only."""
    folders = (ROOT, path.parent) if path in BENCHMARKS else (ROOT,)
    files = (at / f"{name.replace('.', '/')}.py" for at in folders for name in imported(path))
    return frozenset(file for file in files if file in SOURCES or file in BENCHMARKS)


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_point_one_way(room):
    for path in (one for one in tracked(room, ".py") if one.parent == ROOT / room):
        for file in known_files(path):
            place, leaf = name_of(file.parent), name_of(file.with_suffix(""))
            top = place.split("/")[0]
            allowed = {room, "common", *ARROWS[room]}
            # The name of a room stands for the rooms in it too, but not in its own house.
            whole = top in allowed and not room.startswith(top)
            assert place in allowed or whole or leaf in allowed, (name_of(path), leaf)
        tops = {name.split(".")[0] for name in imported(path)}
        assert not tops & MAY_NOT_IMPORT.get(room, set()), path
        scripts = {"train", "sample", "evaluate", "plan", "trace", "prove"}
        assert not tops & scripts, path


def test_no_file_imports_itself_through_others():
    finished: set[Path] = set()

    def visit(path: Path, above: tuple[Path, ...]) -> None:
        assert path not in above, [name_of(one) for one in (*above, path)]
        if path not in finished:
            for file in known_files(path):
                visit(file, (*above, path))
            finished.add(path)

    for path in SOURCES + BENCHMARKS:
        visit(path, ())


def test_no_variable_of_our_own_changes_what_a_run_does():
    readers = [path for path in SOURCES if re.search(r"\benviron\b|\bgetenv\b", text(path))]
    # common/hub_client.py sets what hf_xet, which has no other options, reads when it is loaded.
    readers = [name_of(path) for path in readers]
    # prove.py makes environments of processes, trace.py says what torch's profiler may print.
    others = [
        "common/hub_client.py",
        "proving/attempt.py",
        "proving/launch.py",
        "tracing/session.py",
    ]
    assert readers == [*others, "training/distributed/launcher.py"]


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_promise_5_nothing_is_pickled():
    """Promise 5: no pickle is written or read."""
    forbidden = (
        r"torch\.(load|save)\b|\b(save|load)_state\(|allow_pickle|(gather|cast|scatter)_object"
    )
    for path in SOURCES:
        names = {name.split(".")[0] for name in imported(path)}
        assert not names & {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}, path
        assert not re.search(forbidden, text(path)), path
