"""Does a context of 131,072 tokens fit? Plans of a model with 8 billion parameters on 8 GPUs.

    OMP_NUM_THREADS=1 python benchmarks/long_context.py [--only <word>]

The model has the shape of Llama 3 8B, and the plans are those of plan.py. A step has 8 sequences,
of which a micro-batch has one.
"""

from __future__ import annotations

import argparse
import sys

from harness import ROOT, print_table

sys.path.insert(0, str(ROOT))

from model.recompute import OFFLOAD, SELECTIVE
from planning.cards import CARDS
from planning.estimate import MemoryEstimate
from planning.fake_trace import Shape
from planning.fits import GIB, Candidate, mesh_strategy
from snapshot.disk.model import model_config

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
}
GPUS, SEQUENCES = 8, 8
MEMORY = CARDS["h100"]
MESHES = (
    {"shards": 8},
    {"shards": 4, "tensor": 2},
    {"shards": 1, "tensor": 8},
    {"shards": 8, "context": 2},
    {"shards": 8, "context": 4},
    {"shards": 8, "context": 8},
)
"""Fields of `Shape`."""
WAYS: tuple[bool | str, ...] = (False, SELECTIVE, True, OFFLOAD)
"""Values of model.activation_checkpointing."""
COLUMNS = ("weights", "gradients", "optimizer", "activations", "buffers", "peak", "outside")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="meshes whose name has this in it")
    only = parser.parse_args().only
    rows = []
    for way in WAYS:
        for sizes in MESHES:
            shape = Shape("cuda", "bf16", GPUS, **sizes)
            strategy = mesh_strategy(shape, machines=1)
            if only not in strategy.name:
                continue
            config = model_config(LLAMA, "Llama", 0.0, way)
            candidate = Candidate(strategy, config, MemoryEstimate(config, shape))
            fit = candidate.fit(MEMORY * GIB, 1, SEQUENCES // shape.parts)
            parts = (fit.parameters, fit.gradients, fit.optimizer, fit.activations, fit.buffers)
            figures = [f"{size / GIB:.2f}" for size in (*parts, fit.peak, fit.outside)]
            name = str(way).lower()
            largest = fit.largest_micro_batch or "no"
            row = [name, strategy.name, *figures, f"{fit.on_cpu / GIB:.2f}", largest]
            rows.append([*row, f"{fit.sent / GIB:.0f}"])
            print(*rows[-1], file=sys.stderr)
    heads = ["checkpointing", "mesh", *COLUMNS, "on the CPU", "largest micro-batch", "sent a step"]
    print(f"GiB of each process; {MEMORY} GiB is what a process can use.\n")
    print_table(heads, rows)


if __name__ == "__main__":
    main()
