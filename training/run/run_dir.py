"""Ownership of a folder: a run overwrites and removes files only in its own directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from config.schema import ConfigError
from snapshot.disk.files import TEMPORARY_PREFIX, manifest_entries, snapshot_folders, snapshots_in
from snapshot.errors import SnapshotError
from snapshot.start import METRICS
from store.fetch import PARTIAL
from store.records import EVENTS
from training.reporting.events import SAMPLES, parse_events
from training.reporting.pictures import PAGE
from training.reporting.track import FOLDER as TRACKERS
from training.run.evaluations import BEST

CONFIG_FILE, CURVES = "config.yaml", "curves.png"
EXIT_CODE, LOCK = "exit_code", ".lock"
"""The first is a file with the last attempt's exit code: `accelerate launch` turns each into 1."""
ATTEMPTS = "attempts.txt"
"""The ids of the attempts that uploaded from the directory, to compare with latest.json."""
WRITTEN = (CONFIG_FILE, METRICS, EVENTS, SAMPLES, BEST, ATTEMPTS, CURVES, PAGE, TRACKERS, LOCK)
OF_TRACES = ("trace.html", "trace.json", "profile_*.json")
SECTIONS = {"data", "model", "optim", "train", "snapshot", "run"}
"""Sections of the configuration since its first version."""
LARGEST_CONFIG_BYTES = 1 << 20


def refuse_foreign(run_dir: Path) -> None:
    """Raise ConfigError if a run would overwrite or remove files there that no run wrote.

    A folder is a run's once it holds a run's configuration, metrics, events or a snapshot. Any
    other may hold what it likes under names that no run uses.
    """
    if (found := foreign_file(run_dir)) is not None:
        raise ConfigError(
            f"run.dir={run_dir} holds {found.relative_to(run_dir)}, which no run of this project "
            "wrote, and the run would overwrite it. Give the run a folder of its own, or move "
            f"{found.name} away."
        )


def foreign_file(run_dir: Path) -> Path | None:
    """What a run would overwrite in a folder that is no run's; None if there is nothing."""
    return None if holds_run(run_dir) else next(_in_the_way(run_dir), None)


def holds_run(run_dir: Path) -> bool:
    """Whether a run has written its configuration, metrics, events or a snapshot to a folder."""
    if config_in(run_dir) is not None or _is_of_run(_first_line(run_dir / METRICS)):
        return True
    if parse_events(_first_line(run_dir / EVENTS)):
        return True
    return has_snapshot(run_dir)


def has_snapshot(run_dir: Path) -> bool:
    """Whether a run has written a snapshot to a folder, damaged or not."""
    with suppress(SnapshotError):
        for folder in snapshot_folders(snapshots_in(run_dir)):
            with suppress(SnapshotError):
                manifest_entries(folder)
                return True
    return False


def config_in(run_dir: Path) -> dict[str, Any] | None:
    """The configuration that a run has written to its directory; None if there is none."""
    path = run_dir / CONFIG_FILE
    with suppress(Exception):  # unrelated types: it may be any file
        if path.stat().st_size <= LARGEST_CONFIG_BYTES:
            found = OmegaConf.to_container(OmegaConf.load(path))
            if isinstance(found, dict) and found.keys() >= SECTIONS:
                return {str(key): value for key, value in found.items()}
    return None


def record_attempt(run_dir: Path, attempt_id: str) -> frozenset[str]:
    """Record that an attempt uploads from a directory; returns the attempts that did before it.

    They are over: one process at a time trains in a directory.
    """
    path, before = run_dir / ATTEMPTS, frozenset[str]()
    with suppress(OSError, ValueError):
        before = frozenset(path.read_text(encoding="utf-8").split())
    with suppress(OSError), open(path, "a", encoding="utf-8") as opened:
        opened.write(f"{attempt_id}\n")
    return before


def exit_code_in(path: Path) -> int | None:
    """The exit code that an attempt has left in a file; None if it holds anything else."""
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def may_hold_code(path: Path) -> bool:
    """Whether a file is an exit code's: it holds one, or nothing, or is not there."""
    return exit_code_in(path) is not None or not _holds_anything(path)


def _in_the_way(run_dir: Path) -> Iterator[Path]:
    for name in (*WRITTEN, *OF_TRACES):
        yield from (path for path in run_dir.glob(name) if _holds_anything(path))
        yield from run_dir.glob(f"{name}.new")
    if not may_hold_code(run_dir / EXIT_CODE):
        yield run_dir / EXIT_CODE
    with suppress(OSError):  # reported when a file is created there
        for path in snapshots_in(run_dir).iterdir():  # a start may be killed while it downloads
            if path.name != PARTIAL and not path.name.startswith(TEMPORARY_PREFIX):
                yield path


def _holds_anything(path: Path) -> bool:
    with suppress(OSError):
        return any(path.iterdir()) if path.is_dir() else path.stat().st_size > 0
    return path.is_symlink()


def _first_line(path: Path) -> bytes:
    with suppress(OSError), open(path, "rb") as opened:
        return opened.readline(LARGEST_CONFIG_BYTES)
    return b""


def _is_of_run(line: bytes) -> bool:
    """Whether a line is one of metrics."""
    with suppress(ValueError, RecursionError):
        found = json.loads(line)
        return isinstance(found, dict) and {"event", "step", "loss"} <= found.keys()
    return False
