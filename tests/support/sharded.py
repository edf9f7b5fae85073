"""train.py under FSDP, with a special second snapshot.

python tests/support/sharded.py twice|dies|full|full at once key=value ...

`twice`: the main process gathers and writes every snapshot as well, into the folder `gathered` of
the run's directory. `dies`: the process of rank 1 is killed while it writes the second snapshot.
`full`: its disk is full then, as the system says. `full at once`: that of the main process,
before it creates a file of that snapshot.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train
from snapshot.disk import save
from snapshot.disk.save import Writers
from snapshot.disk.tensors import Part
from training.run import command, writer

RANK = os.environ.get("RANK", "0")
begun: list[int] = []


def begin_and_gather(root: Path, state, *rest, writers: Writers, **more):
    begun.append(state.step)
    snapshot = begin(root, state, *rest, writers=writers, **more)
    if what == "twice":
        assert writers.group.size() >= 2
        alone = Writers(writers.rank)
        begin(root.with_name("gathered"), state, *rest, writers=alone, **more).write()
    return snapshot


def write_or_fail(part, *where) -> None:
    if len(begun) == 2 and RANK == "1" and "mlp.c_fc" in next(iter(part.written.shapes)):
        if what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write(part, *where)


def create_or_fail(*files) -> None:
    if len(begun) == 2:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    create(*files)


if __name__ == "__main__":
    what = sys.argv.pop(1)
    begin, writer.Snapshot = writer.Snapshot, begin_and_gather
    if what in ("dies", "full"):
        write, Part.write = Part.write, write_or_fail
    if what == "full at once":
        create, save.create_files = save.create_files, create_or_fail
    command.run_command(train.main)
