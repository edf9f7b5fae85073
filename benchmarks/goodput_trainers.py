"""A run of 2 layers, 64 wide, by one of several trainers; started on a machine by goodput.py.

All read the same text, have the same global batch and number of steps, and save as often. Every
step waits so long that it takes its time, whatever else the processor does.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from goodput_log import (
    BATCH,
    GONE_SECONDS,
    HEADS,
    LAYERS,
    RATE,
    WIDTH,
    Log,
    T,
    finish,
    world_size,
)
from goodput_peers import PEERS

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # instead of benchmarks/, whose data.py is not the room of that name
GRACE_SECONDS = 7
"""A stop of `auto` waits for the upload before its own."""


def ours(options: argparse.Namespace) -> None:
    """train.py, with a session that also logs."""
    import train
    from training.run import command
    from training.run.session import Session

    log = Log(options, world_size())

    class Logged(Session):
        def restore(self, *prepared: Any) -> None:
            super().restore(*prepared)
            timed = self.report.clock.timed

            def paced(batches: Any) -> Any:
                for batch in timed(batches):
                    inputs, targets = batch[0][:2]
                    log.rows(inputs[(targets >= 0).any(1)])  # without padding
                    log.pace()
                    yield batch

            self.report.clock.timed = paced  # type: ignore[method-assign]

        def steps(self) -> Any:
            for step in super().steps():
                log.begin()
                yield step

        def finish_step(self, step: int, *figures: Any, **metrics: Any) -> Any:
            log.end(step, float(figures[2]))  # a snapshot is no useful time
            return super().finish_step(step, *figures, **metrics)

        def end(self) -> int:
            code = super().end()
            if code == 0:
                finish(options)
            return code

    sys.argv[1:] = [
        "model.family=gpt2",
        f"model.n_layer={LAYERS}",
        f"model.n_head={HEADS}",
        f"model.n_embd={WIDTH}",
        f"data.block_size={T}",
        f"data.cache_dir={options.disk}/data",
        "optim.name=adamw",
        f"optim.learning_rate={RATE}",
        f"train.global_batch_size={BATCH}",
        f"train.max_steps={options.steps}",
        f"train.eval_every={options.steps}",
        "train.eval_batches=1",
        "train.sample_every=0",
        f"run.dir={options.disk}/run",
        f"run.collective_timeout_seconds={GONE_SECONDS}",
        "hub.repo_id=me/run",
        "hub.min_interval_seconds=0",
    ]
    if options.name == "ours" or options.per_day is None:
        sys.argv.append(f"snapshot.every={options.every}")
    else:
        sys.argv += [
            "snapshot.every=auto",
            f"run.interruptions_per_day={options.per_day}",
            f"run.notice_seconds={options.notice_seconds}",
            f"run.grace_seconds={GRACE_SECONDS}",
        ]
    command.run_command(train.main, session_of=Logged)


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=("ours", "auto", *PEERS))
    parser.add_argument("--folder", type=Path, required=True, help="for logs; no machine has it")
    parser.add_argument("--machine", type=int, required=True, help="its number")
    parser.add_argument("--machines", type=int, required=True, help="how many there are at most")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="of a step on one machine")
    parser.add_argument("--per-day", type=float, default=None, help="losses without a notice")
    parser.add_argument("--notice-seconds", type=float, default=0.0)
    parser.add_argument("--lighthouse", default=None)
    options = parser.parse_args()
    options.disk = options.folder / f"disk-{options.machine}"
    torch.set_num_threads(1)
    PEERS.get(options.name, ours)(options)


if __name__ == "__main__":
    main()
