"""The dtypes of all matrix products of a step in bf16 and in fp8, for each family of models.

    python benchmarks/products.py

Counted on a CPU by torch's dispatcher, forward and backward, under accelerate's autocast.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from harness import ROOT, as_words, machine, print_table

import data.pieces  # noqa: F401  (benchmarks/ has a data.py of its own)

sys.path.insert(0, str(ROOT / "tests" / "support"))
from families import FAMILIES, OTHERS
from model.causal_lm import CausalLMConfig, quiet_transformers
from model.family import ModelConfig
from model.fp8 import TENSORWISE, Fp8Error
from model.gpt import GPTConfig
from product_dtypes import products_of_step


def main() -> None:
    """Print a row for each family."""
    quiet_transformers()
    print(as_words(machine()))
    models = {
        "our GPT": GPTConfig(320, 48, 2, 4, 64),
        **{name: CausalLMConfig.read(one) for name, one in {**FAMILIES, **OTHERS}.items()},
    }
    rows, in_fp8 = [], []
    for name, config in models.items():
        products = products_of_step(config.build().train(), torch.arange(64).view(2, 32))
        counted = products.by_dtype()
        other = ", ".join(
            f"{op} in {dtype}" for op, dtype in products.counts if dtype != "bfloat16"
        )
        rows.append((name, sum(counted.values()), counted.get("bfloat16", 0), other or "-"))
        in_fp8.append((name, *fp8_row(config)))
    print_table(("model", "products of a step", "in bf16", "others"), rows)
    print("\nWith mixed_precision: fp8, emulated (tensorwise):\n")
    headers = ("products", "in fp8", "of the FLOP", "linear layers of the blocks in fp8")
    print_table(("model", *headers), in_fp8)


def fp8_row(config: ModelConfig) -> tuple[str, ...]:
    """Products of a step with fp8, those in it, and what they are of the FLOP of a token."""
    model = config.build().train()
    flops = model.flops_per_token(config.block_size)
    try:
        model.use_fp8(TENSORWISE, emulated=True)
    except Fp8Error:
        return ("-", "-", "-", "refused: none")
    assert model.fp8 is not None
    counted = products_of_step(model, torch.arange(64).view(2, 32)).by_dtype()
    found = sum(count for dtypes, count in counted.items() if "float8" in dtypes)
    share = "-" if flops is None else f"{model.fp8.flops_per_token / flops:.0%}"
    return str(sum(counted.values())), str(found), share, model.fp8.as_words()


if __name__ == "__main__":
    main()
