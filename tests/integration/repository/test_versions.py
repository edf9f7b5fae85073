"""Other versions: the oldest allowed of every package, the newest Hub client, other torches."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import runs

PACKAGES = ("huggingface_hub", "hf-xet")
FILES = (
    *(f"unit/store/test_{name}.py" for name in ("xet", "hub_servers", "upkeep", "records")),
    "promises/hub/test_buckets.py",
)

OTHER_TORCH = ("2.14.0", "2.14.1", "2.15.0")
WITH_OTHER_TORCH = (
    "test_any_shape.py::test_several_processes_have_the_losses_of_one",
    "test_any_snapshot.py",
    "test_kill.py",
    "test_precision.py",
    "test_transformers.py",
)
"""Of the promises: processes under DDP and FSDP, resume, compiled blocks, transformers."""


def ranges() -> dict[str, str]:
    """What requirements.txt allows of each package."""
    found = {}
    for line in (runs.ROOT / "requirements.txt").read_text().splitlines():
        if (match := re.match(r"([\w-]+)(>=[^;\s]+)", line)) and match[1] in PACKAGES:
            found[match[1]] = match[2]
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("which", ["oldest", "newest"])
def test_the_hub_client_works_in(tmp_path: Path, which: str):
    allowed = ranges()
    assert set(allowed) == set(PACKAGES)
    if which == "oldest":
        allowed = {
            name: re.sub(r">=([\d.]+).*", r"==\1", versions) for name, versions in allowed.items()
        }
    wanted = [name + versions for name, versions in allowed.items()]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(tmp_path),
    ]
    installed = subprocess.run([*pip, *wanted], capture_output=True, text=True, check=False)
    if installed.returncode != 0:
        pytest.skip(f"no package index: {installed.stderr[-200:]}")
    report = "import huggingface_hub, hf_xet; print(huggingface_hub.__file__, hf_xet.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    files = [str(runs.ROOT / "tests" / name) for name in FILES]
    options = ["-q", "-m", "not slow and not thorough", "-p", "no:cacheprovider"]
    shown = subprocess.run(
        [sys.executable, "-c", report], env=environment, capture_output=True, text=True, check=True
    )
    assert shown.stdout.count(str(tmp_path)) == 2
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        env=environment,
        cwd=runs.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    print(*sorted(path.name for path in tmp_path.glob("*.dist-info")))
    assert result.returncode == 0, result.stdout[-5000:]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_lower_bound_holds(tmp_path: Path):
    """The README's test command in the oldest versions that the requirements allow, together.

    uv resolves them; pip installs them, with the torch that is installed here (CPU or CUDA).
    """
    python, wanted = tmp_path / "venv" / "bin" / "python", tmp_path / "wanted.txt"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet"]
    if subprocess.run([*install, "uv"], check=False).returncode != 0:
        pytest.skip("no package index")
    resolve = [str(python), "-m", "uv", "pip", "compile", "--quiet", "--no-header"]
    oldest = ["--no-annotate", "--resolution", "lowest-direct", "requirements-dev.txt"]
    resolved = subprocess.run(
        [*resolve, *oldest], cwd=runs.ROOT, capture_output=True, text=True, check=True
    ).stdout
    pinned = {line.partition("==")[0]: line for line in resolved.splitlines()}
    cuda = ("torch", "triton", "nvidia-", "cuda-")  # of the CUDA build; torch comes on its own
    wanted.write_text("\n".join(one for name, one in pinned.items() if not name.startswith(cuda)))
    subprocess.run([*install, pinned["torch"]], check=True)
    subprocess.run([*install, "--no-deps", "--requirement", str(wanted)], check=True)
    environment = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    test = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(
        test, env=environment, cwd=runs.ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-8000:]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", OTHER_TORCH)
def test_an_image_s_own_torch_keeps_the_promises(tmp_path: Path, small: list[str], version: str):
    """The README's command for it: all requirements except torch's pin, and the header says so."""
    python, wanted = tmp_path / "venv" / "bin" / "python", tmp_path / "wanted.txt"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", f"torch=={version}"]
    installed = subprocess.run(install, capture_output=True, text=True, check=False)
    if installed.returncode != 0:
        pytest.skip(f"torch {version} cannot be installed: {installed.stderr[-200:]}")
    lines = [
        line
        for path in sorted(runs.ROOT.glob("requirements*.txt"))
        for line in path.read_text().splitlines()
        if not line.startswith(("torch==", "-r ", "#"))
    ]
    wanted.write_text("\n".join(lines))
    subprocess.run([*install, "--requirement", str(wanted)], check=True)

    environment = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    words = [str(python), "train.py", *small, f"run.dir={tmp_path / 'run'}", "train.max_steps=5"]
    header = subprocess.run(
        words, env=environment, cwd=runs.ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert re.search(rf"torch {version}\S* is installed; the tested version is 2\.13\.0 ", header)

    files = [str(runs.ROOT / "tests" / "promises" / name) for name in WITH_OTHER_TORCH]
    options = ["-q", "-m", "not slow", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [str(python), "-m", "pytest", *options, *files],
        env=environment,
        cwd=runs.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    print(result.stdout[-300:])
    assert result.returncode == 0, result.stdout[-8000:]
