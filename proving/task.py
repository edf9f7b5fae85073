"""What an attempt of the proof does besides training, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snapshot.disk.folder import folder_name, read_json, snapshots_in
from store.records import METRICS
from training.reporting.metrics import read_metrics

STEPS = 6
"""Steps of the undisturbed attempt, and of those that are killed and stopped."""
IN_STEP, IN_SNAPSHOT, IN_UPLOAD = "a step", "a snapshot", "an upload"
"""Where an attempt kills itself, as `kill -9` would."""


@dataclass(frozen=True)
class Task:
    """An attempt: steps of the run, in a directory of its own or of an earlier attempt."""

    name: str
    run: str
    """The folder of its run, in the folder of the proof."""
    until: int
    """The last step."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the configuration that differ from the run's, with their values."""
    alone: bool = False
    """Whether one process computes, whatever the number of launched ones."""
    in_float32: bool = False
    """Compute in float32 and without dropout, so that rounding and masks differ in no shape."""
    dies_in: str | None = None
    at: int = 0
    """The step in which it dies, or sends itself a SIGTERM; 0: the first of the attempt."""
    sends_sigterm: bool = False
    describes_run: bool = False
    """Record what the text and the weights are, and how long the parts of a step take."""
    counts_memory: bool = False
    """Count the memory of the last step."""
    fresh: bool = False
    """Start in a new interpreter, which shares nothing with other attempts, as their hash seed."""


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended, and the folder of its run."""

    code: int
    """The exit code of the main process; -9 for one that was killed."""
    folder: Path
    log: Path
    facts: dict[str, Any]
    """What its session recorded; empty if it was killed, or failed."""

    @property
    def losses(self) -> dict[int, float]:
        """The training loss of each step of the run so far."""
        return {record["step"]: record["loss"] for record in self._steps()}

    @property
    def norms(self) -> dict[int, float]:
        """The gradient norm of each step, before clipping."""
        return {record["step"]: record["grad_norm"] for record in self._steps()}

    def snapshot(self, step: int) -> Path:
        """Where the snapshot of a step is, if there is one."""
        return snapshots_in(self.folder) / folder_name(step)

    @property
    def said(self) -> str:
        """All that it wrote."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def last_words(self) -> str:
        """The last line that it wrote, for a message."""
        lines = [line.strip() for line in self.said.split("\n") if line.strip()]
        return lines[-1] if lines else "it wrote nothing"

    def _steps(self) -> list[dict[str, Any]]:
        return [one for one in read_metrics(self.folder / METRICS) if one["event"] == "train"]


def read_facts(path: Path) -> dict[str, Any]:
    """What a session has recorded; empty if it did not come to that."""
    found: dict[str, Any] = read_json(path) if path.exists() else {}
    return found
