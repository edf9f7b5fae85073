"""Other versions: the oldest allowed of every package, and other torches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import runs

OTHER_TORCH = ("2.14.0", "2.14.1", "2.15.0")
WITH_OTHER_TORCH = (
    "test_any_shape.py::test_several_processes_have_the_losses_of_one",
    "test_any_snapshot.py",
    "test_kill.py",
    "test_precision.py",
    "test_transformers.py",
)
"""Of the promises: processes under DDP and FSDP, resume, compiled blocks, transformers."""


def run(*words: object, check: bool = True, **changes: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, **changes}
    return subprocess.run(
        [*map(str, words)],
        env=environment,
        cwd=runs.ROOT,
        capture_output=True,
        text=True,
        check=check,
    )


def install(python: object, *words: object) -> None:
    """Skip the test where there is no package index."""
    result = run(python, "-m", "pip", "install", "--quiet", *words, check=False)
    if result.returncode != 0:
        pytest.skip(f"cannot be installed: {result.stderr[-200:]}")


def assert_passes(python: object, *words: object, **changes: str) -> None:
    """The tests pass in another environment."""
    test = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    result = run(*test, *words, check=False, **changes)
    assert result.returncode == 0, result.stdout[-8000:]


@pytest.fixture
def python(tmp_path) -> Path:
    """The Python of a new environment."""
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    return tmp_path / "venv" / "bin" / "python"


def beside(python: Path) -> dict[str, str]:
    return {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_lower_bound_holds(python: Path, tmp_path: Path):
    """The README's test command in the oldest versions that the requirements allow, together.

    uv resolves them; pip installs them, with the torch that is installed here (CPU or CUDA).
    """
    install(python, "uv")
    resolve = (python, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate")
    resolved = run(*resolve, "--resolution", "lowest-direct", "requirements-dev.txt").stdout
    pinned = {line.partition("==")[0]: line for line in resolved.splitlines()}
    cuda = ("torch", "triton", "nvidia-", "cuda-")  # of the CUDA build; torch comes on its own
    others = "\n".join(one for name, one in pinned.items() if not name.startswith(cuda))
    (tmp_path / "wanted.txt").write_text(others)
    install(python, pinned["torch"])
    run(python, "-m", "pip", "install", "--no-deps", "--requirement", tmp_path / "wanted.txt")
    assert_passes(python, **beside(python))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", OTHER_TORCH)
def test_an_image_s_own_torch_keeps_the_promises(
    python: Path, tmp_path: Path, small: list[str], version: str
):
    """The README's command for it: all requirements except torch's pin."""
    install(python, f"torch=={version}")
    files = sorted(runs.ROOT.glob("requirements*.txt"))
    lines = [line for path in files for line in path.read_text().splitlines()]
    wanted = [line for line in lines if not line.startswith(("torch==", "-r ", "#"))]
    (tmp_path / "wanted.txt").write_text("\n".join(wanted))
    requirements = ("--requirement", tmp_path / "wanted.txt")
    run(python, "-m", "pip", "install", f"torch=={version}", *requirements)
    own = (f"run.dir={tmp_path / 'run'}", "train.max_steps=5")
    run(python, "train.py", *small, *own, **beside(python))
    names = [runs.ROOT / "tests" / "promises" / name for name in WITH_OTHER_TORCH]
    assert_passes(python, "-m", "not slow", *names, **beside(python))
