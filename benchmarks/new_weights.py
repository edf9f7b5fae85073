"""CPU seconds to build a model and give it new weights, compared with one `normal_` over them.

    python benchmarks/new_weights.py [--turns 5]

A GPT of 124 M parameters. "Built by torch" is how each module draws its own weights, in every
process and whole; torch draws most of them twice. "A shard" is what one of several processes draws.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from harness import ROOT, as_words, machine, median, print_table, save, spread

sys.path.insert(0, str(ROOT))
from model import new_weights
from model.families import build_empty, build_model
from model.gpt import GPTConfig
from model.sharded import Piece

SIZES = GPTConfig(vocab_size=50257, block_size=1024, n_layer=12, n_head=12, n_embd=768)
SHARDS = 4


def one_normal() -> None:
    """Draw as many numbers as the model has, tensor by tensor."""
    for one in build_empty(SIZES).parameters():
        one.detach().normal_(std=0.02)


def drawn() -> None:
    """What a start does: the model is built without values, and its weights are drawn."""
    build_empty(SIZES).draw_new_weights(seed=1)


def a_shard() -> None:
    """What the second of several processes draws under FSDP."""
    model = build_empty(SIZES)
    local, pieces = new_weights.local_part, new_weights.pieces_of

    def rows(one: torch.Tensor) -> slice:
        size = -(-len(one) // SHARDS)
        return slice(min(size, len(one)), min(2 * size, len(one)))

    def piece(one: torch.Tensor) -> list[Piece]:
        every = tuple(slice(0, size) for size in one.shape[1:])
        held = rows(one)
        return [Piece((slice(0, held.stop - held.start), *every), (held, *every))]

    new_weights.local_part = lambda one: one.detach()[rows(one)]
    new_weights.pieces_of = piece
    try:
        model.draw_new_weights(seed=1)
    finally:
        new_weights.local_part, new_weights.pieces_of = local, pieces


CASES: dict[str, Callable[[], object]] = {
    "one normal_": one_normal,
    "new weights": drawn,
    f"a shard of {SHARDS}": a_shard,
    "built by torch": lambda: build_model(SIZES),
}


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(as_words(machine()))
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    for turn in range(options.turns + 1):
        for name, case in CASES.items():
            started_at = time.process_time()
            case()
            if turn:  # the first one imports
                seconds[name].append(time.process_time() - started_at)
    base = median(seconds["one normal_"])
    print_table(
        ("case", "CPU seconds", "of one normal_"),
        [(name, spread(all_, 2), f"{median(all_) / base:.2f}") for name, all_ in seconds.items()],
    )
    save("new_weights", seconds)


if __name__ == "__main__":
    main()
