"""The names that a trace gives to the parts of a step."""

from __future__ import annotations

STEP, PREPARE, FORWARD, BACKWARD, CLIP = "step", "prepare", "forward", "backward", "clip"
AGREEMENT, BLOCK = "agreement", "block"
UPDATE = "update"
TORCH_UPDATE = "Optimizer.step#"
"""How torch's own range of an update begins."""
UPDATES = (FORWARD, BACKWARD, CLIP, UPDATE)
PARTS = (PREPARE, *UPDATES, AGREEMENT)
"""Of a step; the first is before all steps."""
