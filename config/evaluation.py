"""How much held-out text an evaluation takes by default."""

from __future__ import annotations

SHARE = 0.1
"""The share of an evaluation in the work of the steps since the one before."""
STEPS_OF_A_BATCH = 1 / 3
"""The work of a forward pass, in that of a step over as many sequences, which has a backward pass
of twice the work."""
FEWEST, MOST = 5, 200


def batches_of_evaluation(eval_every: int, max_steps: int) -> int:
    """The `train.eval_batches` of a run that names none, in global batches.

    Steps decide it and no clock, so that the held-out loss of a run is the same on every machine.
    """
    steps = min(eval_every, max_steps)
    return max(FEWEST, min(MOST, round(SHARE * steps / STEPS_OF_A_BATCH)))
