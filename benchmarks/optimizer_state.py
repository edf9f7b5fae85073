"""Bytes of AdamW's averages by `optim.state_dtype`, and the seconds of an update beside float32.

    python benchmarks/optimizer_state.py [--turns 5] [--layers 12]

A GPT of 124 M parameters with 12 layers, with gradients that are the same for each dtype. The
largest of its parameters, the embedding, is what an update expands at once.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from common import ROOT, as_words, machine, median, print_table, save, spread

sys.path.insert(0, str(ROOT))
from config.schema import OptimConfig
from model.families import build_empty
from model.gpt import GPTConfig
from optim.state_dtype import STATE_DTYPES
from planning.allocation_log import LiveBytes
from training.step import make_optimizer

CPU = torch.device("cpu")


def main() -> None:
    """Print a row for each dtype."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(as_words(machine()))
    model = build_empty(GPTConfig(50257, 1024, options.layers, 12, 768))
    model.draw_new_weights(seed=1)
    for one in model.parameters():
        one.grad = torch.randn(one.shape) * 1e-3
    optimizers = {
        dtype: make_optimizer(model, OptimConfig(state_dtype=dtype), CPU, "no")
        for dtype in STATE_DTYPES
    }
    seconds: dict[str, list[float]] = {dtype: [] for dtype in STATE_DTYPES}
    peaks: dict[str, float] = {}
    for turn in range(options.turns + 1):
        for dtype, optimizer in optimizers.items():
            if turn == 1:
                with LiveBytes() as counted:
                    optimizer.step()
                peaks[dtype] = float(counted.log.totals().sum(axis=1).max(initial=0))
            started_at = time.process_time()
            optimizer.step()
            if turn:  # the first one makes the state
                seconds[dtype].append(time.process_time() - started_at)
    base = median(seconds["float32"])
    rows = []
    for dtype, optimizer in optimizers.items():
        state = [one for of in optimizer.state.values() for one in of.values()]
        kept = sum(one.nbytes for one in state)
        rows.append(
            (
                dtype,
                f"{kept / 1e6:,.1f}",
                f"{(peaks[dtype]) / 1e6:,.1f}",
                spread(seconds[dtype], 2),
                f"{median(seconds[dtype]) / base:.2f}",
            )
        )
    heads = ("optim.state_dtype", "MB kept", "MB for an update", "CPU seconds", "of float32")
    print_table(heads, rows)
    save("optimizer_state", seconds)


if __name__ == "__main__":
    main()
