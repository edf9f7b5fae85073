"""Who installs requirements.txt can run the project, and with requirements-dev.txt the tests."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from runs import ROOT
from tracked import tracked

DISTRIBUTIONS = packages_distributions()
FOR_DEVELOPERS = ("tests", "benchmarks")
FILES = tracked(suffix=".py")
OURS = {path.stem for path in FILES} | {path.parent.name for path in FILES}


def declared(file: str) -> set[str]:
    """The distributions that a requirements file names, and those of the files it includes."""
    names = set()
    for line in (ROOT / file).read_text().splitlines():
        if line.startswith("-r "):
            names |= declared(line.removeprefix("-r ").strip())
        elif match := re.match(r"[\w.-]+", line):
            names.add(canonical(match[0]))
    return names


def is_for_users(path: Path) -> bool:
    """The program of a Space has requirements of its own: tests/unit/browser/test_space.py."""
    return path.relative_to(ROOT).parts[0] not in FOR_DEVELOPERS and path.name != "app.py"


def needs_transformers(path: Path) -> bool:
    """Whether a file is one of those that are only used for models of the Hub."""
    return not {"transformers", "peft", "bitsandbytes", "torchao"}.isdisjoint(imported(path))


def test_our_own_gpt_needs_no_transformers():
    """What is not in requirements.txt is imported only for a model of the Hub."""
    code = "import sys, train, sample, snapshot.base; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported(path: Path) -> set[str]:
    """The packages that a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names - OURS - set(sys.stdlib_module_names)


@pytest.mark.parametrize(
    ("file", "is_meant"),
    [
        ("requirements.txt", lambda path: is_for_users(path) and not needs_transformers(path)),
        ("requirements-models.txt", lambda path: is_for_users(path)),
        ("requirements-dev.txt", lambda path: True),
    ],
)
def test_what_is_imported_is_declared(file, is_meant):
    known, of_trackers = declared(file), declared("requirements-trackers.txt")

    def allowed(path: Path) -> set[str]:
        return known | of_trackers if path.name == "trackers.py" else known

    missing = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in filter(is_meant, FILES)
        for name in imported(path)
        if not allowed(path) & {canonical(found) for found in DISTRIBUTIONS.get(name, [name])}
    }
    assert not missing
