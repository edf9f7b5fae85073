"""The dtypes of all matrix products of a bf16 step, for each family of models.

    python benchmarks/products.py

Counted on a CPU by torch's dispatcher, forward and backward, under accelerate's autocast.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from common import ROOT, as_words, machine, print_table

import data.pieces  # noqa: F401  (benchmarks/ has a data.py of its own)

sys.path.insert(0, str(ROOT / "tests" / "support"))
from families import FAMILIES, OTHERS
from model.causal_lm import CausalLMConfig, quiet_transformers
from model.gpt import GPTConfig
from model.llama import LlamaConfig
from tracing.products import products_of_step


def main() -> None:
    """Print a row for each family."""
    quiet_transformers()
    print(as_words(machine()))
    models = {
        "our GPT": GPTConfig(320, 48, 2, 4, 64),
        "our Llama": LlamaConfig(320, 48, 2, 4, 64),
        **{name: CausalLMConfig.read(one) for name, one in {**FAMILIES, **OTHERS}.items()},
    }
    rows = []
    for name, config in models.items():
        products = products_of_step(config.build().train(), torch.arange(64).view(2, 32))
        counted = products.by_dtype()
        other = ", ".join(
            f"{op} in {dtype}" for op, dtype in products.counts if dtype != "bfloat16"
        )
        rows.append((name, sum(counted.values()), counted.get("bfloat16", 0), other or "-"))
    print_table(("model", "products of a step", "in bf16", "others"), rows)


if __name__ == "__main__":
    main()
