"""What prove.py has found out about a run, and what has changed since."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from config.schema import Config
from config.stored import as_plain
from snapshot.config_values import changed_values
from snapshot.disk.state import versions

PROOF = "proof.json"
FORMAT_VERSION = 1


def folder_of_proof(run_dir: str | Path) -> Path:
    """Where the proof of a run is: next to its directory."""
    return Path(f"{run_dir}-proof")


def read_proof(run_dir: str | Path) -> dict[str, Any] | None:
    """The newest proof of a run; None without one that can be read."""
    try:
        found = json.loads((folder_of_proof(run_dir) / PROOF).read_text(encoding="utf-8"))
        if found["format_version"] != FORMAT_VERSION:
            return None
        in_words(found)
        changes_since(found, {}, "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    assert isinstance(found, dict)
    return found


def in_words(proof: Mapping[str, Any]) -> str:
    """'27 green, 3 grey, on 2 processes, ...; torch 2.13.0'."""
    counts = proof["counts"]
    found = ", ".join(f"{counts[status]} {status}" for status in ("green", "red", "grey"))
    return f"{found}, on {proof['machine']}"


def changes_since(proof: Mapping[str, Any], config: Mapping[str, Any], machine: str) -> list[str]:
    """How a run differs from what was proven: keys, the machine, versions of packages."""
    before, now = proof["versions"], versions()
    found = changed_values(proof["config"], dict(config)) if config else []
    if machine not in ("", proof["machine"]):
        found.append(f"computed on {machine}")
    return found + [
        f"{name} {before[name]} -> {version}"
        for name, version in now.items()
        if name in before and before[name] != version
    ]


def proof_lines(config: Config, machine: str) -> list[str]:
    """What a header says of the proof of its run; nothing without one."""
    proof = read_proof(config.run.dir)
    if proof is None:
        return []
    changes = changes_since(proof, as_plain(config), machine)
    lines = [f"proof     {in_words(proof)}"]
    lines += [f"          since then: {change}" for change in changes]
    return lines + ["          prove.py proves the run as it is now"] * bool(changes)
