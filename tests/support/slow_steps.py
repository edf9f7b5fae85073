"""train.py with steps that last a while.

python tests/support/slow_steps.py seconds key=value ...
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train
from training.run.command import run_command
from training.run.session import Session


class SlowSession(Session):
    """A step waits before it begins, as that of a larger model would compute."""

    def steps(self):
        for step in super().steps():
            time.sleep(SECONDS)
            yield step


if __name__ == "__main__":
    SECONDS = float(sys.argv.pop(1))
    run_command(train.main, session_of=SlowSession)
