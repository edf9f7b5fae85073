"""Runs train.py and counts the bytes of an update's tensors in each process.

accelerate launch [options] tests/support/counted_run.py FOLDER key=value ...

Each process writes FOLDER/<process>.json: its bytes of weights, gradients and optimizer state, and
the peak of tensor bytes from the third step on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train
from planning.allocation_log import LiveBytes
from training.distributed.accelerator import Accelerator
from training.run.command import run_command
from training.run.session import Session

FIRST_MEASURED = 3
"""DDP builds its buckets and AdamW creates its state before it."""


def local_bytes(tensors) -> int:
    """Bytes of this process's shards of the tensors."""
    return sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in tensors)


def main(config, session) -> int:
    found: dict = {}
    tracker = LiveBytes()
    clip, reseed, finish_step = Accelerator.clip_grad_norm_, train.reseed, Session.finish_step

    def measured_clip(accelerator, parameters, *rest):
        parameters = list(parameters)
        found["parameters"] = local_bytes(parameters)
        found["gradients"] = local_bytes(parameter.grad for parameter in parameters)
        found["process"] = accelerator.process_index
        found["processes"] = accelerator.num_processes
        return clip(accelerator, parameters, *rest)

    def measured_reseed(seed, step, process):
        tracker.place = ("update", step)
        reseed(seed, step, process)

    def measured_finish(session, *figures, **metrics):
        tracker.place = ("snapshot", session.state.step)
        states = session._writer._optimizer.state.values()
        found["optimizer"] = local_bytes(one for state in states for one in state.values())
        return finish_step(session, *figures, **metrics)

    Accelerator.clip_grad_norm_, Session.finish_step = measured_clip, measured_finish
    train.reseed = measured_reseed
    with tracker:
        code = train.main(config, session)
    found["peak"] = max(
        int(total.sum())
        for total, place in zip(tracker.totals(), tracker.places, strict=False)
        if place[:1] == ("update",) and place[1] >= FIRST_MEASURED
    )
    (folder / f"{found['process']}.json").write_text(json.dumps(found))
    return code


if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    run_command(main)
