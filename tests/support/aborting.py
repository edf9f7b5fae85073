"""train.py, whose process of rank 0 aborts at step 5 in a thread of C, as NCCL's watchdog does.

accelerate launch ... tests/support/aborting.py key=value ...
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from ctypes import byref, c_void_p, cast
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train
from training.run.command import run_command


def aborted(step: int, *rest):
    if step == 5 and os.environ["RANK"] == "0":
        process = ctypes.CDLL(None)
        process.pthread_create(byref(ctypes.c_ulong()), None, cast(process.abort, c_void_p), None)
        time.sleep(600)  # as a process that waits for the lost one
    return rate(step, *rest)


if __name__ == "__main__":
    rate, train.learning_rate_at = train.learning_rate_at, aborted
    run_command(train.main)
