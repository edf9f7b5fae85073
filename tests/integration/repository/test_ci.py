"""The workflow that runs .ci/run for every change: what it runs, and with which Pythons."""

from __future__ import annotations

import subprocess
import tomllib

import pytest
import yaml
from packaging.specifiers import SpecifierSet

import tracked
from runs import ROOT

FILE = ROOT / ".github" / "workflows" / "ci.yml"
WORKFLOW = yaml.safe_load(FILE.read_text())
(JOB,) = WORKFLOW["jobs"].values()


def test_every_allowed_python_runs_the_same_script():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = SpecifierSet(project["requires-python"])
    pythons = [f"3.{minor}" for minor in range(30) if allowed.contains(f"3.{minor}.0")]
    assert JOB["strategy"]["matrix"] == {"python": pythons}
    assert [step["run"] for step in JOB["steps"] if "run" in step] == ["bash .ci/run"]
    assert (ROOT / ".ci" / "run").is_file()


@pytest.mark.parametrize("by_git", [True, False])
def test_the_files_of_an_environment_are_not_the_project_s(tmp_path, monkeypatch, by_git):
    """A virtual environment in the checkout holds packages with tests and pages of their own."""
    for name in ("train.py", "model/gpt.py", "venv/pyvenv.cfg", "venv/lib/a.py", ".venv/lib/b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    if by_git:
        subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
        subprocess.run(["git", "add", "train.py", "model"], cwd=tmp_path, check=True)
    monkeypatch.setattr("tracked.ROOT", tmp_path)
    monkeypatch.setattr("tracked._all_files", tracked._all_files.__wrapped__)
    names = [path.relative_to(tmp_path).as_posix() for path in tracked.tracked(suffix=".py")]
    assert names == ["model/gpt.py", "train.py"]
