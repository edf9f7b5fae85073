"""Memory of real CPU processes, compared with the estimates of plan.py.

python benchmarks/memory.py plan     the peak of tensor bytes, predicted and counted, by phase
python benchmarks/memory.py shards   what each process stores, and what a snapshot adds to it
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from config.compose import load_config  # noqa: E402
from config.schema import gpt_config  # noqa: E402
from model.fp8 import FP8, TENSORWISE  # noqa: E402
from planning.estimate import MemoryEstimate  # noqa: E402
from planning.fake_trace import Shape  # noqa: E402
from planning.fits import Candidate, Strategy  # noqa: E402

MB = 1e6
VOCABULARY = 103
"""Characters of the default text."""


def measured(
    folder: Path, config: str, processes: int, overrides: list[str], precision: str = "no"
) -> list[dict]:
    """Run benchmarks/measured.py with a shipped config file; the results of each process."""
    content = yaml.safe_load((ROOT / "accelerate_configs" / config).read_text())
    content |= {"num_processes": processes, "gpu_ids": ",".join(["-1"] * processes)}
    content["mixed_precision"] = precision
    if processes == 1:
        del content["gpu_ids"]
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(content))
    for old in folder.glob("*.json"):
        old.unlink()
    shutil.rmtree(folder / "run", ignore_errors=True)
    command = ["accelerate", "launch", "--config_file", str(file), "--main_process_port", "0"]
    script = [str(ROOT / "benchmarks" / "measured.py"), str(folder)]
    result = subprocess.run(
        [*command, *script, *overrides, f"run.dir={folder}/run"],
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
    )
    if result.returncode:
        sys.exit(result.stdout + result.stderr)
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    assert len(found) == processes
    return found


def short_run(model: str, block: int, micro: int, processes: int, *more: str) -> list[str]:
    """Four steps of two micro-batches; an evaluation, a sample and a snapshot after the last."""
    return [
        f"model={model}",
        f"data.block_size={block}",
        f"train.micro_batch_size={micro}",
        f"train.global_batch_size={2 * micro * processes}",
        "train.max_steps=4",
        "train.eval_batches=1",
        "train.sample_every=100",  # one at the end
        "snapshot.every=100",
        "run.attention=products",  # what plan.py assumes
        *more,
    ]


def compare_with_plan(folder: Path) -> None:
    print("| model | context | micro-batch | strategy | precision | checkpointing ", end="")
    print("| plan, MB | counted, MB | plan / counted: update | evaluation | sample | snapshot |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    cases = [
        ("tiny", 64, 12, 1, "no", False),
        ("tiny", 64, 12, 1, "bf16", False),
        ("tiny", 64, 12, 1, "fp8", False),
        ("baby", 256, 4, 1, "fp8", False),
        ("baby", 256, 4, 1, "fp8", True),
        ("baby", 256, 4, 2, "fp8", False),
        ("baby", 256, 4, 1, "no", False),
        ("baby", 256, 4, 1, "bf16", True),
        ("baby", 256, 4, 2, "no", False),
        ("gpt2", 256, 2, 1, "no", False),
        ("gpt2", 256, 2, 1, "no", True),
        ("gpt2", 256, 2, 1, "bf16", False),
        ("gpt2", 256, 2, 1, "bf16", True),
        ("gpt2", 256, 2, 2, "no", False),
        ("gpt2", 256, 2, 2, "bf16", True),
    ]
    for model, block, micro, processes, precision, checkpointing in cases:
        words = [f"model.activation_checkpointing={str(checkpointing).lower()}"]
        overrides = short_run(model, block, micro, processes, *words)
        kinds = [("one process", "cpu.yaml", 1)]
        if processes > 1:
            kinds = [("DDP", "ddp_cpu.yaml", 1), ("FSDP", "fsdp_cpu.yaml", processes)]
        for name, config, shards in kinds:
            loaded = load_config(overrides)
            model_config = gpt_config(loaded, VOCABULARY)
            recipe = TENSORWISE if precision == FP8 else None
            of_rest = precision.replace(FP8, "bf16")
            shape = Shape("cpu", of_rest, processes, shards, fp8=recipe)
            planned = Candidate(
                Strategy(name, config, shape),
                model_config,
                MemoryEstimate(model_config, shape),
            ).peaks(micro, True)
            found = measured(folder, config, processes, overrides, precision)
            counted = {
                phase: max(process["peaks"][phase] for process in found) for phase in planned
            }
            strategy = name if processes == 1 else f"{name} on {processes}"
            cells = [model, block, micro, strategy, precision, "yes" if checkpointing else "no"]
            cells += [f"{max(peaks.values()) / MB:.1f}" for peaks in (planned, counted)]
            cells += [f"{planned[phase] / counted[phase]:.4f}" for phase in planned]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def compare_shards(folder: Path) -> None:
    print("| model | strategy | weights, MB | gradients | optimizer | sum | of DDP's ", end="")
    print("| snapshot adds to tensors | to resident, of |")
    print("|---|---|---|---|---|---|---|---|---|")
    for processes in (2, 4):
        of_ddp = 0
        for name, config in (("DDP", "ddp_cpu.yaml"), ("FSDP", "fsdp_cpu.yaml")):
            words = short_run("gpt2", 64, 1, processes, f"snapshot.piece_bytes={PIECE}")
            found = measured(folder, config, processes, words)
            sizes = [[p[kind] for kind in ("parameters", "gradients", "optimizer")] for p in found]
            most = max(sizes, key=sum)
            of_ddp = of_ddp or sum(most)
            worst = max((p["snapshots"][-1] for p in found), key=lambda one: one["added"])
            tensors = max(p["tensors_added"] for p in found)
            cells = ["gpt2", f"{name} on {processes}", *(f"{size / MB:.1f}" for size in most)]
            cells += [f"{sum(most) / MB:.1f}", f"{sum(most) / of_ddp:.4f}"]
            cells += [f"{tensors / MB:.0f}"]
            cells += [f"{worst['added'] / MB:.0f}, {worst['before'] / MB:.0f}"]
            print("| " + " | ".join(cells) + " |", flush=True)


PIECE = 100_000_000

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("plan", "shards"))
    chosen = parser.parse_args().what
    with tempfile.TemporaryDirectory() as place:
        (compare_with_plan if chosen == "plan" else compare_shards)(Path(place))
