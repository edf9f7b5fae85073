"""The Hub client's oldest and newest allowed versions, each in an environment of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import runs

PACKAGES = ("huggingface_hub", "hf-xet")
FILES = ("test_xet", "test_hub_servers", "test_upkeep", "test_records", "test_promise_buckets")


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
    files = [str(runs.ROOT / "tests" / f"{name}.py") for name in FILES]
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
