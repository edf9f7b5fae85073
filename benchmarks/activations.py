"""What checkpointing and masked documents cost: bytes and FLOP.

    python benchmarks/activations.py checkpointing|packing

Counted on the CPU in real steps; the last columns are plans for a GPU in bf16. No time is measured.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import as_words, machine, print_table, save
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from config.schema import OptimConfig
from data.documents import DocumentRows, Documents
from data.token_file import TokenStream
from model.families import build_model
from model.family import ModelConfig
from model.gpt import GPTConfig
from model.head import IGNORED
from model.recompute import WAYS
from planning.allocation_log import KINDS, LiveBytes
from planning.fake_trace import Shape, traced_phases
from snapshot.disk.model import model_config
from training.step import make_optimizer

VOCABULARY, TIME, LAYERS, HEADS, WIDTH, BATCH = 256, 128, 2, 4, 64, 4
QWEN = {
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "max_position_embeddings": TIME,
    "hidden_size": WIDTH,
    "intermediate_size": 3 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": WIDTH // HEADS,
}
FAMILY_NAMES = ("gpt2", "qwen3 of transformers")


def sizes(name: str, way: bool | str) -> ModelConfig:
    """A small model of a family."""
    if name != "gpt2":
        return model_config(QWEN, name, 0.0, way)
    return GPTConfig(VOCABULARY, TIME, LAYERS, HEADS, WIDTH, activation_checkpointing=way)


def counted(config: ModelConfig) -> tuple[int, int, float]:
    """The peak bytes of an update after another one, FLOP of a pass, and its loss."""
    torch.manual_seed(0)
    model = build_model(config).train()
    optimizer = make_optimizer(model, OptimConfig(), torch.device("cpu"), "no")
    ids = torch.randint(VOCABULARY, (BATCH, config.block_size))
    log = LiveBytes()
    log.mark(model.parameters(), "parameters")
    with log:
        for update in range(2):
            log.place = ("update", update)
            for _ in range(2):  # micro-batches
                loss = model(ids, ids)
                (loss / 2).backward()
                value = loss.item()
                del loss
            optimizer.step()
            optimizer.zero_grad()
    with FlopCounterMode(display=False) as flop:  # it keeps tensors, so not while bytes are counted
        model(ids, ids).backward()
    totals = zip(log.log.totals(), log.log.places, strict=False)
    peak = max(int(total.sum()) for total, place in totals if place == ("update", 1))
    return peak, flop.get_total_flops(), value


def planned(config: ModelConfig, device: str, precision: str) -> tuple[int, int]:
    """The peak bytes of an update on the device, and those in the CPU's memory."""
    shape = Shape(device, precision, attention="kernel")
    trace = traced_phases(config, BATCH, shape).log
    host = KINDS.index("host")
    totals = [
        (int(total.sum() - total[host]), int(total[host]))
        for total, place in zip(trace.totals(), trace.places, strict=False)
        if place[1:2] not in (("evaluation",), ("sampling",))
    ]
    return max(one for one, _ in totals), max(other for _, other in totals)


def checkpointing() -> list[dict[str, Any]]:
    """A row for each family and value of the key."""
    rows, first = [], {}
    for name in FAMILY_NAMES:
        for way in WAYS:
            config = sizes(name, way)
            peak, flop, loss = counted(config)
            before = first.setdefault(name, (flop, loss))
            cpu, _ = planned(config, "cpu", "no")
            gpu, host = planned(config, "cuda", "bf16")
            rows.append(
                {
                    "model": name,
                    "value": str(way).lower(),
                    "recomputed, % of FLOP": round(100 * (flop / before[0] - 1), 1),
                    "peak, MB": round(peak / 1e6, 2),
                    "plan / peak": round(cpu / peak, 4),
                    "same loss": "yes" if loss == before[1] else "no",
                    "GPU plan, MB": round(gpu / 1e6, 2),
                    "host, MB": round(host / 1e6, 2),
                }
            )
    return rows


def packing() -> list[dict[str, Any]]:
    """A row for each family: one document a row, and packed; what an epoch computes."""
    drawn = np.random.default_rng(1)
    lengths = drawn.integers(8, TIME // 2, size=32)
    ends = np.cumsum(lengths)
    tokens = TokenStream([drawn.integers(VOCABULARY, size=ends[-1])])
    trained = TokenStream([np.ones(ends[-1], dtype=np.uint8)])
    text = Documents(tokens, ends, trained, lengths - 1)
    found = []
    for name in FAMILY_NAMES:
        torch.manual_seed(0)
        model, row = build_model(sizes(name, False)).eval(), {"model": name}
        for pack in (False, True):
            rows = DocumentRows(text, TIME, IGNORED, pack)
            loss = flop = 0.0
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                for item in rows.in_order(None):
                    batch, _ = rows.__getitems__([item])
                    loss += model(*batch).item() * int((batch[1] != IGNORED).sum())
                flop = counter.get_total_flops()
            kind = "packed" if pack else "one a row"
            row |= {f"rows, {kind}": len(rows), f"GFLOP, {kind}": round(flop / 1e9, 2)}
            row[f"loss, {kind}"] = round(loss / rows.target_count, 7)
        plans = {
            kernel: traced_phases(
                sizes(name, False), BATCH, Shape("cuda", "bf16", packed=True, attention=kernel)
            ).log
            for kernel in ("kernel", "varlen")
        }
        for kernel, log in plans.items():
            row[f"GPU plan by {kernel}, MB"] = round(log.totals().sum(1).max() / 1e6, 2)
        found.append(row)
    return found


TABLES = {"checkpointing": checkpointing, "packing": packing}


def main() -> None:
    """One table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=tuple(TABLES))
    what = parser.parse_args().what
    print(as_words(machine()))
    rows = TABLES[what]()
    print_table(tuple(rows[0]), [list(row.values()) for row in rows])
    save(f"activations_{what}", rows)


if __name__ == "__main__":
    sys.exit(main())
