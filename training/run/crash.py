"""A process that dies inside a library leaves an exit code and a cause, as any other end does.

Where another process is lost, the watchdog of torch's NCCL backend raises SIGABRT in a thread
without Python: no handler and no `finally` of ours runs then. So faulthandler, whose handler is in
C, writes into a pipe, and a small process at its other end does what this one no longer can.

The alternatives: TORCH_NCCL_ASYNC_ERROR_HANDLING=0 or 2 keeps the process alive, but it would train
with the numbers of a broken collective, and torch's monitor still aborts (pytorch issues
126544 and 155916). TORCH_NCCL_BLOCKING_WAIT=1 waits for each collective on the CPU.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
from contextlib import suppress

from training.exits import EXIT_FAILED, RESUME
from training.run.run_dir import RunLock

WATCHER = """
read -r first || exit 0
[ -e "$1" ] || echo "$2" > "$1"
printf '\\nstopped: %s%s\\n%s\\n' "${first#Fatal Python error: }" "$3" "$first" >&2
exec cat >&2
"""
"""Ends with the pipe, which closes with the process. Nothing is in it unless that crashes."""
CAUSE = (
    ": torch or another library has ended this process. If a message of NCCL's watchdog is above, "
    f"another process is gone, or cannot be reached. {RESUME}"
)


def watch_for_crash(lock: RunLock) -> None:
    """Leave exit code 1 in the run's directory if a library ends this process, and print why.

    Only a process that leaves a code needs this: the first of each machine, which holds the lock.
    """
    if (path := lock.code_file) is None:
        return
    reading, writing = os.pipe()
    with suppress(OSError):  # too many processes: a crash leaves no code then
        subprocess.Popen(
            ["/bin/sh", "-c", WATCHER, "sh", str(path), str(EXIT_FAILED), CAUSE],
            stdin=reading,
            start_new_session=True,  # or the launcher would end it with this process
        )
        faulthandler.enable(file=writing)
    os.close(reading)
