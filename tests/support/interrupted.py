"""train.py, killed in the evaluation after a step, when its snapshot has been written.

python tests/support/interrupted.py STEP key=value ...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train
from training.reporting.report import Report
from training.run import command


def main(config, session) -> int:
    evaluate = train.held_out_loss
    stepped = Report.add
    at = [0]

    def add(report, step, *figures):
        at[0] = step
        stepped(report, step, *figures)

    def evaluate_or_die(accelerator, model, batches):
        if at[0] == killed_after:
            session.finish_writing()
            os._exit(9)
        return evaluate(accelerator, model, batches)

    Report.add, train.held_out_loss = add, evaluate_or_die
    return train.main(config, session)


if __name__ == "__main__":
    killed_after = int(sys.argv.pop(1))
    command.run_command(main)
