"""What is due after a step."""

from __future__ import annotations

from typing import NamedTuple

from config.schema import Config


class Due(NamedTuple):
    """What the loop does after a step, in this order."""

    save: bool = False
    evaluate: bool = False
    sample: bool = False


def due_after(step: int, config: Config, last: bool, stopping: bool) -> Due:
    """What is due after `step`: the run's `last`, or one at which it is `stopping`, or any."""
    train, snapshot = config.train, config.snapshot
    return Due(
        save=last or stopping or step % snapshot.every == 0,
        evaluate=last or step % train.eval_every == 0,
        sample=train.sample_every > 0 and (last or step % train.sample_every == 0),
    )
