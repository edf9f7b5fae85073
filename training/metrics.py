"""metrics.jsonl: one JSON object a line, every step once, over all restarts of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line that was cut short is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


class MetricsFile:
    """Appends lines. A disk that takes none does not stop a run: they wait and are tried again."""

    def __init__(self, path: Path, step: int) -> None:
        """Continue a file after `step`; what comes later in it will be done again."""
        self.path = path
        self.waiting: list[str] = []
        self.fault: str | None = None
        """Why the last write failed; None when it did not."""
        kept = [line for line in read_metrics(path) if line["step"] <= step]
        replacement = path.with_suffix(".jsonl.new")
        replacement.write_text("".join(_line(record) for record in kept), encoding="utf-8")
        replacement.rename(path)
        self.size = path.stat().st_size

    def append(self, records: list[dict[str, Any]]) -> None:
        """Add lines, as far as the disk takes them."""
        self.waiting += [_line(record) for record in records]
        content = "".join(self.waiting).encode()
        try:
            with open(self.path, "r+b") as opened:
                opened.truncate(self.size)  # half a line, where the last write failed
                opened.seek(self.size)
                opened.write(content)
        except OSError as error:
            self.fault = f"{self.path}: {error.strerror}"
            return
        self.size += len(content)
        self.waiting.clear()
        self.fault = None

    def flush(self) -> None:
        """Have the disk hold all lines: a snapshot must not outlive the metrics before it."""
        try:
            with open(self.path, "rb") as opened:
                os.fsync(opened.fileno())
        except OSError as error:
            self.fault = f"{self.path}: {error.strerror}"


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
