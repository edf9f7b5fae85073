"""Process groups that only say who this process is, and what scripts measure in real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import runs


class Group:
    """A process group of which only the size and the rank are asked."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = lambda: size, lambda: rank


def measured(shared: str, folder: Path, processes: int) -> dict[str, Any]:
    """What so many processes write that share the contexts or tensors of models."""
    file, found = runs.rehearsal("ddp_cpu.yaml", folder, processes), folder / "found.json"
    script = runs.ROOT / "tests" / "support" / "shared_models.py"
    result = runs.run(runs.launch_command(file, shared, str(found), script=script))
    assert result.returncode == 0, result.stderr
    content = json.loads(found.read_text())
    assert content.pop("processes") == processes
    return content


def assert_equal_losses_and_gradients(content: dict[str, Any]) -> None:
    """By model and kind of rows: what was measured is within the rounding of float32."""
    for name, kinds in content.items():
        for kind, (loss, gradient) in kinds.items():
            assert loss < 2e-6, (name, kind)
            assert gradient < 1e-5, (name, kind)
