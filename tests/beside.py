"""train.py, whose snapshots are written only once the step after them has begun.

python tests/beside.py goes_on|fails key=value ...

Where that step waits for the snapshot, the run fails; also where an update does not. With `fails`
the step itself does, while a snapshot is being written.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train
from model.gpt import GPT
from training import saving
from training.launch import run_command

LONGEST_SECONDS = 20


def under_way() -> bool:
    return any(thread.name == "snapshot" for thread in threading.enumerate())


def main(config, signals) -> int:
    in_step, beside = threading.Event(), []
    begin, forward, adamw = saving.begin_snapshot, GPT.forward, train.adamw

    def begin_and_linger(root, state, *rest, **named):
        finish = begin(root, state, *rest, **named)

        def finish_in_step() -> Path:
            if threading.current_thread() is not threading.main_thread():
                assert in_step.wait(LONGEST_SECONDS), "the step waits for the snapshot"
                beside.append(state.step)
            return finish()

        in_step.clear()
        return finish_in_step

    def forward_and_tell(model, *rest, **named):
        if model.training and under_way():
            in_step.set()
            if ending == "fails":
                raise ArithmeticError("in the step beside a snapshot")
        return forward(model, *rest, **named)

    def refuse_to_change(*_) -> None:
        assert not under_way(), "the weights change under a snapshot"

    def watched_adamw(*arguments):
        optimizer = adamw(*arguments)
        optimizer.register_step_pre_hook(refuse_to_change)
        return optimizer

    saving.begin_snapshot, GPT.forward, train.adamw = (
        begin_and_linger,
        forward_and_tell,
        watched_adamw,
    )
    code = train.main(config, signals)
    if beside:
        print(f"beside a step: {beside}")
    return code


if __name__ == "__main__":
    ending = sys.argv.pop(1)
    run_command(main)
