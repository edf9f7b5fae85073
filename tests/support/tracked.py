"""The files of the project as git lists them, without those of an environment or of a run."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def tracked(folder: str = ".", suffix: str = "") -> list[Path]:
    """The project's files below a folder, those of one suffix if it is given, in order."""
    below = ROOT / folder
    return [path for path in _all_files() if path.is_relative_to(below) and _ends(path, suffix)]


def _ends(path: Path, suffix: str) -> bool:
    return not suffix or path.suffix == suffix


@cache
def _all_files() -> tuple[Path, ...]:
    listing = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"]
    try:
        listed = subprocess.run(
            listing, cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout
    except OSError:  # there is no git
        listed = ""
    found = [ROOT / name for name in listed.split("\0") if name]
    if not found:  # a downloaded archive
        found = [path for path in ROOT.rglob("*") if not _in_an_environment(path)]
    return tuple(sorted(path for path in found if path.is_file()))


def _in_an_environment(path: Path) -> bool:
    inside = [one for one in path.parents if one.is_relative_to(ROOT) and one != ROOT]
    return any((one / "pyvenv.cfg").exists() or one.name[0] == "." for one in inside)


def name_of(path: Path) -> str:
    """A file's name in the project."""
    return path.relative_to(ROOT).as_posix()


def _is_product(path: Path) -> bool:
    top = path.relative_to(ROOT).parts[0]
    return top in SCRIPTS or (ROOT / top / "__init__.py").is_file()


SCRIPTS = ("train.py", "sample.py", "evaluate.py", "plan.py", "prove.py", "trace.py")
SOURCES = [path for path in tracked(suffix=".py") if _is_product(path)]
"""What runs for a user: the scripts, and the packages."""
