"""samples.jsonl: the texts that a run has generated, one JSON object a line with step and text."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from training.reporting.tail import newest_lines

SAMPLES = "samples.jsonl"


def add_sample(run_dir: Path, step: int, text: str) -> None:
    """Append a sample. A disk that refuses it costs the sample, not the run."""
    line = json.dumps({"step": step, "text": text})
    with suppress(OSError), open(run_dir / SAMPLES, "a", encoding="utf-8") as opened:
        opened.write(f"{line}\n")


def read_samples(run_dir: Path) -> dict[int, str]:
    """The newest samples by step; of a step that was repeated after a restart, the newest one."""
    found: dict[int, str] = {}
    for line in newest_lines(run_dir / SAMPLES).splitlines():
        with suppress(ValueError, KeyError, TypeError):
            entry = json.loads(line)
            found[int(entry["step"])] = str(entry["text"])
    return found
