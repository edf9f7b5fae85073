"""metrics.jsonl: one JSON object a line, every step once, over all restarts of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from training.config import ConfigError


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line that was cut short is left out.

    Raises ConfigError that names the line when the file holds something else.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
            known = isinstance(record, dict) and type(record.get("step")) is int
        except ValueError:
            known = False
        if not known or record.get("event") not in ("train", "eval"):
            raise ConfigError(
                f"line {number} of {path} is not a line of metrics. Remove it, or move the file "
                "out of run.dir; the run itself does not need it."
            )
        records.append(record)
    return records


def held_out_at(path: Path, step: int) -> float | None:
    """The held-out loss of a step; None where the file does not have it."""
    found = [r["loss"] for r in read_metrics(path) if r["event"] == "eval" and r["step"] == step]
    return found[-1] if found else None


def write_whole(path: Path, content: str) -> None:
    """Replace a file by one with this content, or leave it as it is: flushed, then renamed."""
    partial = path.with_name(f"{path.name}.new")
    try:
        with open(partial, "w", encoding="utf-8") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


class MetricsFile:
    """Appends lines. A disk that takes none does not stop a run: they wait and are tried again."""

    def __init__(self, path: Path, step: int) -> None:
        """Continue a file after `step`; what comes later in it will be done again."""
        self.path = path
        self.waiting: list[str] = []
        self.fault: str | None = None
        """Why the last write failed; None when it did not."""
        kept = [record for record in read_metrics(path) if record["step"] <= step]
        write_whole(path, "".join(map(_line, kept)))
        self.size = path.stat().st_size

    def append(self, records: list[dict[str, Any]]) -> None:
        """Add lines, as far as the disk takes them."""
        self.waiting += map(_line, records)
        content = "".join(self.waiting).encode()
        try:
            # "a" makes the file anew where somebody removed it; one that was cut is gone on with.
            with open(self.path, "ab") as opened:
                if opened.tell() > self.size:
                    opened.truncate(self.size)  # half a line, where the last write failed
                self.size = min(self.size, opened.tell())
                opened.write(content)
        except OSError as error:
            self.fault = f"{self.path}: {error.strerror}"
            return
        self.size += len(content)
        self.waiting.clear()
        self.fault = None

    def flush(self) -> None:
        """Have the disk hold all lines. Raises OSError when it does not take them."""
        self.append([])
        if self.waiting:
            raise OSError(self.fault)
        with open(self.path, "rb") as opened:
            os.fsync(opened.fileno())


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
