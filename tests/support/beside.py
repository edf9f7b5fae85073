"""train.py, whose snapshots are written only once the step after them has begun.

python tests/support/beside.py goes_on|lags|fails|dies key=value ...

Where that step waits for the snapshot, the run fails; also where an update does not, with `goes_on`
and no memory for copies. With `lags`, the copies that an update makes are written only when three
more updates have been made. With `fails` the step itself does, while a snapshot is being written;
with `dies` the process of rank 1 does, and the snapshot is written only when the others have been
told to end.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train
from model.gpt import GPT
from snapshot.disk.save import Snapshot
from snapshot.disk.tensors import Part
from training.run import command, writer
from training.run.session import Session
from training.run.stopping import Signals

LONGEST_SECONDS = 20
LAG = 3
told_to_end = threading.Event()


def main(config, session) -> int:
    begun, in_step, whole = threading.Event(), threading.Event(), threading.Event()
    lagged = threading.Semaphore(0)
    beside: list[int] = []
    pending: list[Snapshot] = []
    lags_left = threading.Event()
    begin, forward, restore = writer.Snapshot, GPT.forward, Session.restore
    write_part = Part.write
    whole.set()

    def begin_and_linger(root, state, *rest, **more):
        snapshot = begin(root, state, *rest, **more)
        write, step = snapshot.write, state.step
        pending.clear()
        if step == config.train.max_steps:  # no step follows
            return snapshot

        def write_in_step(*arguments) -> Path:
            assert in_step.wait(LONGEST_SECONDS), "the step waits for the snapshot"
            assert ending != "dies" or told_to_end.wait(LONGEST_SECONDS), "nobody told"
            beside.append(step)
            try:
                return write(*arguments)
            finally:
                whole.set()

        snapshot.write = write_in_step
        pending.append(snapshot)
        lags_left.set()
        while lagged.acquire(blocking=False):
            pass
        begun.set()
        in_step.clear()
        whole.clear()
        return snapshot

    def write_late(part, *where) -> None:
        is_copy = bool(pending) and pending[0]._released.is_set()
        in_background = threading.current_thread() is not threading.main_thread()
        if is_copy and in_background and lags_left.is_set():  # the first one
            lags_left.clear()
            for _ in range(LAG):
                assert lagged.acquire(timeout=LONGEST_SECONDS), "no more updates come"
        write_part(part, *where)

    def forward_and_tell(model, *rest, **named):
        if model.training and not whole.is_set():
            in_step.set()
            if ending == "fails":
                raise ArithmeticError("in the step beside a snapshot")
        if model.training and ending == "dies" and begun.is_set() and os.environ["RANK"] == "1":
            os._exit(9)
        return forward(model, *rest, **named)

    def refuse_to_change(*_) -> None:
        lagged.release()
        if ending == "goes_on" and pending:
            assert not pending[0]._parts, "the weights change under it"

    def restore_and_watch(session, model, optimizer, *rest):
        restore(session, model, optimizer, *rest)
        optimizer.optimizer.register_step_pre_hook(refuse_to_change)  # after the session's own

    writer.Snapshot, GPT.forward = begin_and_linger, forward_and_tell
    Session.restore = restore_and_watch
    if ending == "lags":
        Part.write = write_late
    if ending == "goes_on":
        writer.room_for_copies = lambda: 0
    code = train.main(config, session)
    if beside:
        print(f"beside a step: {beside}")
    return code


def take_and_tell(signals: Signals, number: int) -> None:
    told_to_end.set()  # before the run has noticed that rank 1 is gone, or after it
    take(signals, number)


if __name__ == "__main__":
    ending = sys.argv.pop(1)
    take, Signals._take = Signals._take, take_and_tell
    command.run_command(main)
