"""train.py, whose main process prints the process groups in which it has called a collective.

accelerate launch ... tests/support/groups.py key=value ...
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train
from training.distributed.launcher import is_main_process
from training.distributed.processes import OF_THREADS
from training.run.command import run_command
from training.run.session import Session


class Counting(Session):
    def end(self) -> int:
        from torch.distributed import distributed_c10d as c10d

        used = [one for one in c10d._world.pg_map if one._get_sequence_number_for_group() > 0]
        if is_main_process():
            names = {one.group_desc for one in used} - {OF_THREADS}  # which is on the CPU
            print("groups", *sorted(names), flush=True)
        return super().end()


if __name__ == "__main__":
    run_command(train.main, session_of=Counting)
