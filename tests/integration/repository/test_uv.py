"""What uv installs is what pip installs: pyproject.toml, uv.lock and the requirements files."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from urllib.parse import urlsplit

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from runs import ROOT
from tracked import tracked

PACKAGE = "uv==0.13.9"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = tomllib.loads((ROOT / "uv.lock").read_text())
INDEX = "https://pypi.org/simple"


def listed(file: str) -> tuple[list[str], set[str]]:
    """The requirements files that one includes, and the requirements of its own, normalized."""
    lines = (ROOT / file).read_text().splitlines()
    included = [line.removeprefix("-r ") for line in lines if line.startswith("-r ")]
    return included, {str(Requirement(line)) for line in lines if line[:1] not in ("#", "-")}


def group(name: str) -> tuple[list[str], set[str]]:
    """The same of a dependency group."""
    entries = PROJECT["dependency-groups"][name]
    included = [
        f"requirements-{one['include-group']}.txt" for one in entries if isinstance(one, dict)
    ]
    return included, {str(Requirement(one)) for one in entries if isinstance(one, str)}


def test_the_project_depends_on_what_requirements_txt_lists():
    own = {str(Requirement(one)) for one in PROJECT["project"]["dependencies"]}
    assert ([], own) == listed("requirements.txt")


@pytest.mark.parametrize("name", ["models", "trackers", "dev"])
def test_each_group_is_the_requirements_file_of_its_name(name):
    included, own = listed(f"requirements-{name}.txt")
    # The project's own dependencies come with each group.
    assert group(name) == ([file for file in included if file != "requirements.txt"], own)
    groups = {f"requirements-{one}" for one in PROJECT["dependency-groups"]}
    assert {file.stem for file in tracked(suffix=".txt")} == {"requirements", *groups}


def versions() -> dict[str, set[str]]:
    """The versions of each package in the lock: more than one where Pythons differ."""
    found: dict[str, set[str]] = {}
    for package in LOCK["package"]:
        found.setdefault(package["name"], set()).add(package["version"])
    return found


@pytest.mark.parametrize("file", [path.name for path in tracked(suffix=".txt")])
def test_the_locked_versions_are_in_the_ranges_of(file):
    for requirement in map(Requirement, listed(file)[1]):
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        assert versions()[name], requirement
        assert all(requirement.specifier.contains(one) for one in versions()[name]), requirement


def test_the_lock_takes_all_from_the_public_index_with_hashes():
    for package in LOCK["package"]:
        if package["name"] == PROJECT["project"]["name"]:
            assert package["source"] == {"virtual": "."}  # scripts: nothing is built of them
            continue
        assert package["source"] == {"registry": INDEX}
        files = [*package.get("wheels", []), *filter(None, [package.get("sdist")])]
        assert files
        for one in files:
            assert urlsplit(one["url"]).hostname == "files.pythonhosted.org"
            assert one["hash"].startswith("sha256:")
        assert "+" not in package["version"]


def test_the_range_of_pythons_is_that_of_torch_s_wheels():
    (torch,) = (package for package in LOCK["package"] if package["name"] == "torch")
    assert f"torch=={torch['version']}" in listed("requirements.txt")[1]
    wheels = {int(found[1]) for one in torch["wheels"] if (found := tag(one["url"]))}
    allowed = SpecifierSet(PROJECT["project"]["requires-python"])
    assert wheels == {minor for minor in range(30) if allowed.contains(f"3.{minor}.0")}
    assert LOCK["requires-python"].replace(" ", "") == ">=3.11,<3.15"


def tag(url: str) -> re.Match | None:
    return re.search(r"-cp3(\d+)-cp3\d+-manylinux\w+_x86_64\.whl$", url)


@pytest.mark.slow
def test_uv_finds_nothing_to_change_in_the_lock(tmp_path):
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path), PACKAGE]
    installed = subprocess.run(pip, capture_output=True, text=True, check=False)
    if installed.returncode != 0:
        pytest.skip(f"no package index: {installed.stderr[-200:]}")
    uv = [str(tmp_path / "bin" / "uv"), "--cache-dir", str(tmp_path / "cache"), "lock", "--check"]
    python = ["--python", sys.executable, "--default-index", INDEX]
    result = subprocess.run([*uv, *python], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
