"""A Dockerfile and what its builder is sent, read without Docker."""

from __future__ import annotations

import json
import re
from pathlib import Path

from runs import ROOT


def instructions(path: Path) -> dict[str, str]:
    """The words of each instruction by its name, without comments, on one line; the last of a name.

    ENTRYPOINT and HEALTHCHECK are commands; an argument of the build is `ARG <name>`.
    """
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found = {}
    for name, words in (line.split(" ", 1) for line in joined.split("\n") if line):
        if name == "ARG":
            key, words = words.split("=", 1)
            name = f"ARG {key}"
        found[name] = words.split(" CMD ", 1)[-1]
    return found


def entrypoint(path: Path) -> list[str]:
    """The words that begin every command of a container."""
    words: list[str] = json.loads(instructions(path)["ENTRYPOINT"])
    return words


def sent() -> list[str]:
    """What .dockerignore leaves for the builder: it ignores everything but some names."""
    first, *rest = [
        line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] != "#"
    ]
    assert first == "*"
    assert rest.pop() == "**/__pycache__"
    assert all(re.fullmatch(r"![\w.-]+", line) for line in rest), rest
    return [line.removeprefix("!") for line in rest]
