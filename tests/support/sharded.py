"""train.py under FSDP, with a special second snapshot.

python tests/support/sharded.py twice|dies|full|apart key=value ...

`twice`: the main process gathers and writes every snapshot as well, into the folder `gathered` of
the run's directory. `dies`: the process of rank 1 is killed while it writes the second snapshot.
`full`: its disk is full then, as the system says. `apart`: rank 1 has another disk.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train
from snapshot.disk.shards import Shard
from snapshot.disk.writing import Destination
from training.run import command, saving

RANK = os.environ.get("RANK", "0")
begun: list[int] = []


def begin_and_gather(to: Destination, state, *rest):
    begun.append(state.step)
    pending = begin(to, state, *rest)
    if what == "twice":
        assert len(to.peers.writing) >= 2
        gathered = Destination(to.root.with_name("gathered"), to.piece_bytes, to.is_main)
        begin(gathered, state, *rest).write()
    return pending


def write_or_fail(shard, files) -> None:
    if len(begun) == 2 and RANK == "1" and "mlp.c_fc" in next(iter(shard.shapes)):
        if what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write(shard, files)


if __name__ == "__main__":
    what = sys.argv.pop(1)
    begin, saving.begin_snapshot = saving.begin_snapshot, begin_and_gather
    if what in ("dies", "full"):
        write, Shard.write = Shard.write, write_or_fail
    if what == "apart" and RANK == "1":
        saving.snapshots_in = lambda run_dir: run_dir.parent / "another disk"
    command.run_command(train.main)
