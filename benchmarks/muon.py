"""What Muon's update costs a process: FLOP and bytes, counted, and seconds on this machine.

    OMP_NUM_THREADS=1 python benchmarks/muon.py [--root <another checkout>] [--turns 5]

FLOP and bytes are counted in process 0 of a fake process group, on tensors without data, of a GPT-2
of 124 M parameters in bf16. Seconds are those of optimizer.step() of a smaller GPT in real
processes over gloo, the slowest of them, each checkout in turns; of one process, its CPU seconds.
--root is another version.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import ROOT, as_words, machine, median, print_table, spread

SHAPES = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 4), (4, 2))
"""Processes, and how many of them share a copy: 1 is DDP, all of them FSDP."""
UPDATES = 4


def name_of(processes: int, shards: int) -> str:
    """A row's name."""
    if processes == 1:
        return "one process"
    if shards in (1, processes):
        return f"{'DDP' if shards == 1 else 'FSDP'} on {processes}"
    return f"hybrid, {processes // shards} x {shards}"


def count(processes: int, shards: int) -> dict[str, float]:
    """FLOP of an update and the bytes that a process sends in it, and the bytes of its batches."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    from config.schema import OptimConfig
    from model.gpt import GPTConfig
    from planning.allocation_log import LiveBytes
    from planning.fake_trace import Shape, _bare_model, _fake_process_group, _sharded
    from training.step import make_optimizer

    shape = Shape("cpu", "bf16", processes, shards, "muon")
    config = GPTConfig(vocab_size=50257, block_size=1024, n_layer=12, n_head=12, n_embd=768)
    memory, counter = LiveBytes(), FlopCounterMode(display=False)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with _fake_process_group(shape) as mesh, fake:
        bare = _bare_model(config, shape)
        model: Any = bare if mesh is None else _sharded(bare, mesh, shape)
        optimizer = make_optimizer(bare, OptimConfig(name="muon"), torch.device("cpu"), "bf16")
        for one in model.parameters():
            one.grad = torch.zeros_like(one)
        optimizer.step()
        for one in (*model.parameters(), *(one.grad for one in model.parameters())):
            memory.mark([one], "parameters")
        for state in optimizer.state.values():
            memory.mark(state.values(), "optimizer")
        begin = len(memory.log.places)
        with memory, counter:
            optimizer.step()
    totals = memory.log.totals().sum(axis=1)
    within, across = (shards - 1) / shards, 1 - shards / processes
    sent = 0.0
    for (_, kind), size in memory.traffic.items():
        is_across = shards == 1 or kind.endswith("of updates")
        sent += (across if is_across else within) * size
    batches = totals.max() - totals[begin - 1]
    return {"flop": counter.get_total_flops(), "sent": sent, "batches": float(batches)}


def work(shards: int) -> None:
    """Measure updates, as one of several processes, and print the seconds of the slowest."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from config.schema import OptimConfig
    from model.gpt import GPT, GPTConfig
    from training.step import make_optimizer

    dist.init_process_group("gloo")
    processes = dist.get_world_size()
    torch.manual_seed(1)
    model: Any = GPT(GPTConfig(vocab_size=103, block_size=64, n_layer=4, n_head=4, n_embd=512))
    bare = model
    if shards > 1:
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (processes // shards, shards), mesh_dim_names=names)
        model = fully_shard(model, mesh=mesh if shards < processes else mesh["shard"])
    optimizer = make_optimizer(bare, OptimConfig(name="muon"), torch.device("cpu"), "no")
    seconds = []
    clock = time.process_time if processes == 1 else time.perf_counter  # it waits for nobody
    for _ in range(UPDATES + 1):
        for one in model.parameters():
            one.grad = torch.randn_like(one)
        dist.barrier()
        begun = clock()
        optimizer.step()
        dist.barrier()
        seconds.append(clock() - begun)
    if dist.get_rank() == 0:
        print("seconds:", json.dumps(seconds[1:]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run(root: Path, *words: object) -> str:
    """What this script prints with the code of a checkout."""
    # A script's own folder is searched first: a copy of it finds the other checkout's code.
    with tempfile.TemporaryDirectory() as place:
        for name in ("muon.py", "harness.py"):
            (Path(place) / name).write_text((ROOT / "benchmarks" / name).read_text())
        command = [sys.executable]
        if words[0] == "work":
            command += ["-m", "torch.distributed.run", f"--nproc-per-node={words[1]}"]
            command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
        result = subprocess.run(
            [*command, str(Path(place) / "muon.py"), *map(str, words)],
            env={**os.environ, "PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
        )
    if result.returncode:
        sys.exit(result.stdout + result.stderr)
    return result.stdout


def main() -> None:
    """Print a row for each shape, with this version and the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    roots = [ROOT] if options.root is None else [options.root.resolve(), ROOT]
    print(as_words(machine()))
    rows = []
    for shape in SHAPES:
        counted = [json.loads(run(root, "count", *shape)) for root in roots]
        cells = [
            " -> ".join(f"{found[key] / unit:,.1f}" for found in counted)
            for key, unit in (("flop", 1e9), ("sent", 1e6), ("batches", 1e6))
        ]
        seconds: list[list[float]] = [[] for _ in roots]
        for _ in range(options.turns if shape[0] <= (os.cpu_count() or 1) else 0):
            for of_root, root in zip(seconds, roots, strict=True):
                out = run(root, "work", *shape).partition("seconds: ")[2]
                of_root.append(median(json.loads(out.splitlines()[0])))
        times = " -> ".join(spread(of_root) for of_root in seconds if of_root)
        ratios = [old / new for old, new in zip(*seconds, strict=True)] if len(roots) > 1 else []
        rows.append((name_of(*shape), *cells, times, spread(ratios, 2) if ratios else ""))
    heads = ("", "GFLOP", "MB sent", "MB of batches", "seconds of a step", "times as fast")
    print_table(heads, rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["count"]:
        print(json.dumps(count(*map(int, sys.argv[2:]))))
    elif sys.argv[1:2] == ["work"]:
        work(int(sys.argv[3]))
    else:
        main()
