"""Memory of adapters around weights in float32, in 16 bits and in four bits; needs no GPU.

python benchmarks/frozen.py    bytes and peak of a small Llama on a CPU in bf16: planned and counted
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from accelerate.utils.operations import ConvertOutputsToFp32
from harness import print_table
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from config.schema import OptimConfig
from model.causal_lm import CausalLMConfig
from model.families import build_model
from model.frozen import keep_frozen
from model.lora import Lora
from planning.allocation_log import LiveBytes
from planning.estimate import MemoryEstimate
from planning.fake_trace import Shape
from training.step import make_optimizer

KINDS = {"float32": "as before", "bf16": "auto, of a bf16 base", "nf4": "QLoRA"}
PRECISION, BATCH, TIME = "bf16", 2, 128
CONTENT = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": TIME,
}


def small_llama(checkpointing: bool) -> CausalLMConfig:
    config = CausalLMConfig.read(CONTENT, activation_checkpointing=checkpointing)
    return replace(config, lora=Lora(rank=8, alpha=16))


def counted(config: CausalLMConfig, kind: str) -> tuple[int, int]:
    """Bytes of the frozen weights, and the peak of the second update of two micro-batches."""
    torch.manual_seed(0)
    model = build_model(config)
    keep_frozen(model, kind, "bf16")
    kept = sum(one.nbytes for one in model.parameters() if not one.requires_grad)
    autocast = torch.autocast("cpu", torch.bfloat16)
    model.forward = ConvertOutputsToFp32(autocast(model.forward))
    optimizer = make_optimizer(model, OptimConfig(), torch.device("cpu"), "no")
    ids = torch.randint(config.vocab_size, (BATCH, TIME))
    tracker = LiveBytes()
    tracker.mark(model.parameters(), "parameters")
    with tracker:
        for update in range(2):
            tracker.place = (update,)
            for _ in range(2):
                (model(ids, ids) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    totals = zip(tracker.log.totals().sum(axis=1), tracker.log.places, strict=True)
    return kept, max(int(total) for total, place in totals if place == (1,))


def main() -> None:
    rows = []
    for checkpointing in (False, True):
        config = small_llama(checkpointing)
        for kind, words in KINDS.items():
            kept, peak = counted(config, kind)
            shape = Shape("cpu", PRECISION, frozen_dtype=kind, stored_as="bf16")
            planned = MemoryEstimate(config, shape).peaks(BATCH, True)["update"]
            cells = [f"{size / 1e6:.2f}" for size in (kept, planned, peak)]
            recomputed = "yes" if checkpointing else "no"
            rows.append([f"{kind} ({words})", recomputed, *cells, f"{planned / peak:.4f}"])
    heads = ["frozen weights", "checkpointing", "their MB", "plan, MB", "counted, MB"]
    print_table([*heads, "plan / counted"], rows)


if __name__ == "__main__":
    main()
