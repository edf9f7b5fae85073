"""The names that a trace gives to the parts of a step."""

from __future__ import annotations

STEP, PREPARE, FORWARD, BACKWARD, CLIP = "step", "prepare", "forward", "backward", "clip"
AGREEMENT, BLOCK = "agreement", "block"
UPDATE = "update"
TORCH_UPDATE = "Optimizer.step#"
"""The start of the name of torch's own range of an update."""
UPDATES = (FORWARD, BACKWARD, CLIP, UPDATE)
PARTS = (PREPARE, *UPDATES, AGREEMENT)
"""The parts of a step; the first precedes all steps."""
