"""The loss of a large vocabulary: ours, in chunks, beside transformers' own, of all logits.

    python benchmarks/loss.py [--vocabulary 49152] [--rows 4] [--length 512] [--turns 3]

A step is forward, backward and AdamW's update of a Llama with SmolLM2's shape (135 M parameters
with its own vocabulary), in float32 on one thread. Each loop counts the bytes of its tensors in a
step of its own, the weights among them, and is timed in turns with the other. `--turns 0` only
counts. The losses of the first step are compared.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness import print_table, spread
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from config.schema import OptimConfig
from model.causal_lm import CausalLM, CausalLMConfig
from planning.allocation_log import LiveBytes
from planning.estimate import MemoryEstimate
from planning.fake_trace import Shape
from training.step import make_optimizer

SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
"""The sizes in the config.json of HuggingFaceTB/SmolLM2-135M, without its vocabulary."""


def ours(model: CausalLM, ids: Tensor, targets: Tensor) -> Tensor:
    """The loss of a run."""
    return model(ids, targets)


def theirs(model: CausalLM, ids: Tensor, targets: Tensor) -> Tensor:
    """The loss of a bare loop over transformers' model, which shifts labels itself."""
    labels = torch.cat((ids[:, :1], targets[:, :-1]), dim=1)
    loss: Tensor = model.lm(input_ids=ids, labels=labels, use_cache=False).loss
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("vocabulary", 49152), ("rows", 4), ("length", 512), ("turns", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    sizes = {"vocab_size": options.vocabulary, "max_position_embeddings": options.length}
    config = CausalLMConfig.read({**SMOLLM2, **sizes})
    model = CausalLM(config)
    optimizer = make_optimizer(model, OptimConfig(name="adamw"), torch.device("cpu"), "no")
    text = torch.randint(options.vocabulary, (options.rows, options.length + 1))
    ids, targets = text[:, :-1], text[:, 1:]
    targets = torch.cat((targets[:, :-1], torch.full_like(targets[:, -1:], -100)), dim=1)

    def step(loss_of: Callable[..., Tensor]) -> float:
        loss = loss_of(model, ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step(ours)  # creates the optimizer's state
    held = [
        *model.parameters(),
        *(one for state in optimizer.state.values() for one in state.values()),
    ]
    with torch.no_grad():
        first = {
            loss_of.__name__: float(loss_of(model, ids, targets)) for loss_of in (ours, theirs)
        }
    peaks = {}
    for loss_of in (ours, theirs):
        tracker = LiveBytes()
        tracker.mark(held, "parameters")
        with tracker:
            step(loss_of)
        peaks[loss_of.__name__] = int(tracker.log.totals().sum(axis=1).max())
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for turn in range(options.turns):
        for loss_of in (ours, theirs) if turn % 2 else (theirs, ours):
            began = time.process_time()
            step(loss_of)
            seconds[loss_of.__name__].append(time.process_time() - began)
    planned = MemoryEstimate(config, Shape("cpu")).peaks(options.rows, False)["update"]
    print(f"vocabulary {options.vocabulary:,}, {options.rows} x {options.length} tokens")
    print_table(
        ("loop", "loss", "peak MB", "planned / counted", "CPU seconds a step"),
        [
            (
                name,
                f"{first[name]:.6f}",
                f"{peaks[name] / 1e6:,.0f}",
                f"{planned / peaks[name]:.4f}" if name == "ours" else "",
                spread(seconds[name]) if options.turns else "",
            )
            for name in seconds
        ],
    )
    if options.turns:
        ratios = [own / other for own, other in zip(*seconds.values(), strict=True)]
        print(f"CPU seconds, ours / theirs: {spread(ratios)}")


if __name__ == "__main__":
    main()
