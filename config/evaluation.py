"""How much held-out text an evaluation takes by default."""

from __future__ import annotations

SHARE = 0.1
"""The work of an evaluation, as a share of the steps since the last evaluation."""
STEPS_OF_A_BATCH = 1 / 3
"""The work of a forward pass, as a share of a step over as many sequences. The backward pass of a
step is twice the work of its forward pass."""
FEWEST, MOST = 5, 200


def batches_of_evaluation(eval_every: int, max_steps: int) -> int:
    """The `train.eval_batches` of a run that names none, in global batches.

    It depends on steps and not on a clock, so a run's held-out loss is the same on every machine.
    """
    steps = min(eval_every, max_steps)
    return max(FEWEST, min(MOST, round(SHARE * steps / STEPS_OF_A_BATCH)))
