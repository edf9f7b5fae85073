"""What trace.py counts over what plan.py predicts: each model in each shape of processes.

    OMP_NUM_THREADS=1 python benchmarks/predictions.py [--turns 3] [--shapes ...] [--models ...]

A cell has the ratio of the collectives' bytes that is furthest from 1, and that of the peak of
tensors in process 0. A collective that is late holds its buffer longer than planned, so of several
turns the lowest peak counts. It takes an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from common import ROOT, as_words, launch, machine, print_table

TENSOR, CONTEXT, SHARDS = (f"parallelism_config_{one}_size" for one in ("tp", "cp", "dp_shard"))
BY_HEADS = {"parallelism_config_cp_comm_strategy": "alltoall"}
SHAPES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "1": ("cpu.yaml", 1, {}),
    "DDP 2": ("ddp_cpu.yaml", 2, {}),
    "FSDP 2": ("fsdp_cpu.yaml", 2, {}),
    "hybrid 2 x 2": ("fsdp_hybrid_cpu.yaml", 4, {}),
    "tp 2": ("tp_cpu.yaml", 2, {}),
    "tp 2 x shard 2": ("fsdp_tp_cpu.yaml", 4, {}),
    "cp 2": ("cp_cpu.yaml", 2, {}),
    "cp 2 by heads": ("cp_cpu.yaml", 2, BY_HEADS),
    "cp 2 x shard 2": ("cp_cpu.yaml", 4, {SHARDS: 2}),
    "cp 2 x tp 2": ("tp_cpu.yaml", 4, {CONTEXT: 2}),
}
"""A shipped accelerate config file, the number of processes, and entries of its
parallelism_config."""
SIZES = {
    "vocab_size": 103,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
}
MODELS: dict[str, list[str] | dict[str, Any]] = {
    "GPT-2": ["model=tiny"],
    "our Llama": ["model=llama_tiny"],
    "Llama": {"model_type": "llama", **SIZES},
    "Qwen3": {"model_type": "qwen3", **SIZES},
    "Mixtral": {"model_type": "mixtral", "num_local_experts": 4, **SIZES},
}
"""Presets of ours, and config.json of models of transformers."""
NUMBER = r"([\d,]+)"


def traced(shape: str, model: str, folder: Path) -> tuple[float, float]:
    """The ratios of one trace: of bytes, and of the peak. Raises RuntimeError if it fails."""
    shipped, processes, entries = SHAPES[shape]
    config = yaml.safe_load((ROOT / "accelerate_configs" / shipped).read_text())
    config |= {"num_processes": processes, "mixed_precision": "no", "main_process_port": 0}
    config |= {"gpu_ids": ",".join(["-1"] * processes)}
    if entries:
        config["parallelism_config"] |= entries
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(config))
    words = MODELS[model]
    if not isinstance(words, list):
        (folder / "config.json").write_text(json.dumps(words))
        words = [f"model.architecture={folder}"]
    words = [*words, f"run.dir={folder / 'run'}", "data.tokenizer=char", "data.block_size=64"]
    words += ["optim.name=adamw", "train.micro_batch_size=2", "train.global_batch_size=8"]
    result = subprocess.run(
        launch(str(folder / "accelerate.yaml"), "trace.py", *words),
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
    )
    if result.returncode:
        raise RuntimeError((result.stdout + result.stderr)[-1500:])
    found = re.findall(rf"^\S.*?  +{NUMBER} +{NUMBER} +{NUMBER} ", result.stdout, re.MULTILINE)
    sizes = [[float(one.replace(",", "")) for one in row[1:]] for row in found]
    ratios = [counted / predicted for counted, predicted in sizes]
    page = (folder / "run-trace" / "trace.html").read_text()
    peak = re.search(r"counted over predicted is ([\d.]+)\.<", page)
    assert peak is not None
    return max(ratios, key=lambda one: abs(one - 1), default=1.0), float(peak[1])


def measured(shape: str, model: str, turns: int) -> str:
    """A cell of the table; empty where no processes share the matrices of such a model."""
    if model == "Mixtral" and "tp" in shape:
        return ""
    found = []
    for _ in range(turns):
        with tempfile.TemporaryDirectory() as folder:
            try:
                found.append(traced(shape, model, Path(folder)))
            except RuntimeError as error:
                print(f"{shape}, {model}: {error}", file=sys.stderr)
                return "failed"
        if found[-1][1] <= 1.02:
            break
    furthest = max((one for one, _ in found), key=lambda one: abs(one - 1))
    return f"{furthest:.4f}, {min(peak for _, peak in found):.3f}"


def main() -> None:
    """Print a row for each shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3, help="at most so many, while above 1.02")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    options = parser.parse_args()
    print(as_words(machine()))
    rows = []
    for shape in options.shapes:
        rows.append([shape, *(measured(shape, one, options.turns) for one in options.models)])
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    print_table(["bytes, peak", *options.models], rows)


if __name__ == "__main__":
    main()
