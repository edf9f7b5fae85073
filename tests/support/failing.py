"""train.py, of which the process of rank 1 fails at step 5, alone.

accelerate launch ... tests/support/failing.py key=value ...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train
from training.run.command import run_command


def broken(step: int, *rest):
    if step == 5 and os.environ["RANK"] == "1":
        raise ValueError("only rank 1 knows why")
    return rate(step, *rest)


if __name__ == "__main__":
    rate, train.learning_rate_at = train.learning_rate_at, broken
    run_command(train.main)
