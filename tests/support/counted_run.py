"""Runs train.py and measures its memory. Started by tests:

accelerate launch [options] tests/support/counted_run.py FOLDER key=value ...

Each process writes FOLDER/<process>.json: its bytes of weights, gradients and optimizer state; the
peak of tensor bytes from the third step on, in total and in each phase; and what snapshots added to
tensor bytes and to the resident memory. Samples are only the last characters, which use the most
memory.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from concurrent.futures import Future
from pathlib import Path

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train
from model.generate import generate
from planning.allocation_log import LiveBytes
from training.distributed.accelerator import Accelerator
from training.evaluation import Sample, held_out_loss
from training.run import session as session_file
from training.run import writer as writer_file
from training.run.command import run_command
from training.run.writer import SnapshotWriter

FIRST_MEASURED = 3
"""DDP builds its buckets and AdamW creates its state before it."""


def local_bytes(tensors) -> int:
    """Bytes of this process's shards of the tensors."""
    return sum(
        local.numel() * local.element_size()
        for local in (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)
    )


def last_characters(accelerator, model, *_, **__) -> Sample:
    """The end of a sample, when the context is full and the window slides."""
    model = accelerator.unwrap_model(model, keep_torch_compile=False)
    length = model.config.block_size - 1
    prompt = torch.zeros(1, length, dtype=torch.int64, device=accelerator.device)
    for _ in generate(model, prompt, 4, temperature=0.8, top_k=200):
        pass
    return Sample("")


class InThisThread:
    """An executor whose work is done when it is submitted."""

    def __init__(self, *_) -> None:
        pass

    def submit(self, work, *arguments) -> Future:
        future = Future()
        future.set_result(work(*arguments))
        return future

    def shutdown(self) -> None:
        """Nothing is left."""


class PeakMemory:
    """The peak resident memory of this process since the object was created."""

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
        """`work`, whose allocations are recorded under this phase."""

        def wrapped(*rest, **named):
            before = tracker.place
            tracker.place = (phase, before[1])
            try:
                return work(*rest, **named)
            finally:
                tracker.place = before

        return wrapped

    def measured_begin(writer, *rest, **named):
        optimizer = writer._optimizer
        states = [tensor for state in optimizer.state.values() for tensor in state.values()]
        found["optimizer"] = local_bytes(states)
        memory = PeakMemory()
        begin(writer, *rest, **named)
        found["snapshots"].append({"before": memory.before, "added": memory.added()})

    Accelerator.clip_grad_norm_ = measured_clip
    train.reseed, SnapshotWriter.begin = measured_reseed, in_phase("snapshot", measured_begin)
    for module in (train, session_file):
        module.held_out_loss = in_phase("evaluation", held_out_loss)
    train.sample_text = in_phase("sampling", last_characters)
    writer_file.ThreadPoolExecutor = InThisThread  # whose tensors are counted
    with tracker:
        code = train.main(config, session)
    totals = defaultdict(list)
    for total, place in zip(tracker.log.totals(), tracker.log.places, strict=False):
        if place and place[1] >= FIRST_MEASURED:
            totals[place[0]].append(int(total.sum()))
    found["peaks"] = {phase: max(values) for phase, values in totals.items()}
    found["peak"] = max(found["peaks"].values())
    found["tensors_added"] = found["peaks"]["snapshot"] - totals["snapshot"][0]
    (folder / f"{found['process']}.json").write_text(json.dumps(found))
    return code


if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    run_command(main)
