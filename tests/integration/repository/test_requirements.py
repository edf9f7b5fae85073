"""What is imported is required, and pip and uv install the same."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from runs import ROOT
from tracked import tracked

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
GROUPS = PROJECT["dependency-groups"]
DISTRIBUTIONS = packages_distributions()
FOR_DEVELOPERS = ("tests", "benchmarks")
OF_MODELS = {"transformers", "peft", "bitsandbytes", "torchao"}
FILES = tracked(suffix=".py")
OURS = {path.stem for path in FILES} | {path.parent.name for path in FILES}


def listed(file: str) -> tuple[list[str], set[str]]:
    """The requirements files that one includes, and the requirements of its own, normalized."""
    lines = (ROOT / file).read_text().splitlines()
    included = [line.removeprefix("-r ") for line in lines if line.startswith("-r ")]
    return included, {str(Requirement(line)) for line in lines if line[:1] not in ("#", "-", "")}


def declared(file: str) -> set[str]:
    """The distributions that a requirements file names, and those of the files it includes."""
    included, own = listed(file)
    names = {canonicalize_name(Requirement(one).name) for one in own}
    return names.union(*map(declared, included))


def imported(path: Path) -> set[str]:
    """The packages that a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names - OURS - set(sys.stdlib_module_names)


def is_for_users(path: Path) -> bool:
    """The program of a Space has requirements of its own: tests/unit/browser/test_space.py."""
    return path.relative_to(ROOT).parts[0] not in FOR_DEVELOPERS and path.name != "app.py"


@pytest.mark.parametrize(
    ("file", "is_meant"),
    [
        ("requirements.txt", lambda path: is_for_users(path) and not OF_MODELS & imported(path)),
        ("requirements-models.txt", is_for_users),
        ("requirements-dev.txt", lambda path: True),
    ],
)
def test_what_is_imported_is_declared(file, is_meant):
    known, of_trackers = declared(file), declared("requirements-trackers.txt")
    missing = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in filter(is_meant, FILES)
        for name in imported(path)
        if not (known | of_trackers if path.name == "trackers.py" else known)
        & {canonicalize_name(one) for one in DISTRIBUTIONS.get(name, [name])}
    }
    assert not missing


def test_our_own_gpt_needs_no_transformers():
    """What is not in requirements.txt is imported only for a model of the Hub."""
    code = "import sys, train, sample; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_groups_of_pyproject_are_the_requirements_files():
    own = {str(Requirement(one)) for one in PROJECT["project"]["dependencies"]}
    assert ([], own) == listed("requirements.txt")
    names = {f"requirements-{name}" for name in GROUPS}
    assert {file.stem for file in tracked(suffix=".txt")} == {"requirements", *names}
    for name, entries in GROUPS.items():
        included, own = listed(f"requirements-{name}.txt")
        assert {str(Requirement(one)) for one in entries if isinstance(one, str)} == own
        groups = [one["include-group"] for one in entries if isinstance(one, dict)]
        # The project's own dependencies come with each group.
        files = [f"requirements-{one}.txt" for one in groups]
        assert files == [file for file in included if file != "requirements.txt"]
