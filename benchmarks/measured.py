"""train.py, measured in each process while it runs. Started by benchmarks/memory.py and by tests:

accelerate launch [options] benchmarks/measured.py FOLDER key=value ...

Writes FOLDER/<process>.json: bytes of weights, gradients and optimizer state that the process
holds; the peak of tensor bytes in the third step and after, and in each phase of it, counted as
they come and go; and what writing snapshots added to tensor bytes and to the process's resident
memory. Of a sample there are the last characters only, which take the most.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train
from model.generate import generate
from planning.allocation_log import LiveBytes
from training.evaluation import held_out_loss
from training.run import saving
from training.run import session as session_file
from training.run.command import run_command
from training.run.saving import SnapshotWriter

FIRST_MEASURED = 3
"""DDP finds its buckets and AdamW makes its state before it."""


def local_bytes(tensors) -> int:
    """What of these tensors lies in this process."""
    return sum(
        local.numel() * local.element_size()
        for local in (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)
    )


def last_characters(accelerator, model, *_, **__) -> str:
    """The end of a sample, where the context is full and slides."""
    model = accelerator.unwrap_model(model, keep_torch_compile=False)
    length = model.config.block_size - 1
    prompt = torch.zeros(1, length, dtype=torch.int64, device=accelerator.device)
    for _ in generate(model, prompt, 4, temperature=0.8, top_k=200):
        pass
    return ""


class HighWater:
    """The largest resident memory of this process since it was made."""

    def __init__(self) -> None:
        self.before = psutil.Process().memory_info().rss
        Path("/proc/self/clear_refs").write_text("5")

    def added(self) -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        (line,) = (line for line in status if line.startswith("VmHWM"))
        return 1024 * int(line.split()[1]) - self.before


def main(config, session) -> int:
    found: dict = {"snapshots": []}
    tracker = LiveBytes()
    clip, reseed, begin = Accelerator.clip_grad_norm_, train.reseed, SnapshotWriter.begin

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

    def in_phase(phase, work):
        """`work`, what it allocates and frees being of this phase."""

        def worked(*rest, **named):
            before = tracker.place
            tracker.place = (phase, before[1])
            try:
                return work(*rest, **named)
            finally:
                tracker.place = before

        return worked

    def measured_begin(its, *rest, **named):
        optimizer = its._optimizer
        states = [tensor for state in optimizer.state.values() for tensor in state.values()]
        found["optimizer"] = local_bytes(states)
        water = HighWater()
        begin(its, *rest, **named)
        found["snapshots"].append({"before": water.before, "added": water.added()})

    Accelerator.clip_grad_norm_ = measured_clip
    train.reseed, SnapshotWriter.begin = measured_reseed, in_phase("snapshot", measured_begin)
    for room in (train, session_file):  # the loop's evaluation, and the probe before a snapshot
        room.held_out_loss = in_phase("evaluation", held_out_loss)
    train.sample_text = in_phase("sampling", last_characters)
    saving.available_memory = lambda: 0  # so that it is written here, where its tensors are counted
    with tracker:
        code = train.main(config, session)
    totals = defaultdict(list)
    for total, place in zip(tracker.log.totals(), tracker.log.places, strict=False):
        if place and place[1] >= FIRST_MEASURED:
            totals[place[0]].append(int(total.sum()))
    found["peaks"] = {phase: max(of_it) for phase, of_it in totals.items()}
    found["peak"] = max(found["peaks"].values())
    found["tensors_added"] = found["peaks"]["snapshot"] - totals["snapshot"][0]
    (folder / f"{found['process']}.json").write_text(json.dumps(found))
    return code


if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    run_command(main)
