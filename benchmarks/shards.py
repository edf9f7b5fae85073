"""A large snapshot of two processes under FSDP: each writes its shards, or the main process all.

`measure` starts this file under `accelerate launch`, with random weights and moments. In turns, the
processes write by `Snapshot`, by it with all shards gathered, and by `async_save` of
torch.distributed.checkpoint; `dd` with conv=fsync writes as many bytes. An update that comes at
once waits until `release` returns, or `async_save`. Before a restore, the files leave the cache.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness import ROOT, launch, median, print_table, save, spread

sys.path.insert(0, str(ROOT))

WAYS = ("shards", "copies", "gathered", "async_save")
NAMES = {
    "shards": "each process its shards",
    "copies": "the same, with copies",
    "gathered": "gathered by the main process",
    "async_save": "torch.distributed.checkpoint, async_save",
}
Figures = dict[str, dict[str, list[float]]]


def measure(model: str, turns: int, ways: list[str]) -> None:
    """Print the table of a model's preset, such as gpt2_large."""
    with tempfile.TemporaryDirectory(dir=ROOT / "benchmarks") as place:
        words = (model, str(turns), place, *ways)
        command = launch("fsdp_cpu.yaml", "benchmarks/shards.py", *words)
        result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("@ "))
    found = json.loads(line[2:])
    size, figures = found["bytes"], found["figures"]
    disk = figures.pop("dd")["durable"]
    print(f"{model}: {size / 1e9:.2f} GB; dd {spread([size / 1e9 / one for one in disk], 2)} GB/s")
    rows = []
    for way, of_way in figures.items():
        speed = [size / 1e9 / seconds for seconds in of_way["durable"]]
        share = median(speed) / median([size / 1e9 / one for one in disk])
        times = [spread(of_way[kind], 1) for kind in ("held", "durable", "restore")]
        rows.append((NAMES[way], *times, spread(speed, 2), f"{share:.2f}"))
    print_table(("", "held, s", "durable, s", "restored, s", "GB/s", "of dd"), rows)
    save(f"snapshots-shards-{model}", {"model": model, **found, "dd": disk})


class Bench:
    """A sharded model with the state of AdamW, and the ways to write it."""

    def __init__(self, model: str, place: Path) -> None:
        import torch
        import torch.distributed as dist
        from accelerate import Accelerator

        from config.compose import load_config
        from model.gpt import GPT, GPTConfig
        from training.distributed.accelerator import accelerator_options
        from training.memory import available_memory
        from training.run.writer import writers_of
        from training.step import make_optimizer

        self.place, self.dist = place, dist
        self.config = load_config([f"model={model}", f"run.dir={place}", "hub.repo_id=null"])
        self.accelerator = Accelerator(**accelerator_options(self.config))
        sizes = self.config.model
        with torch.device("meta"):
            bare = GPT(GPTConfig(50257, 1024, sizes.n_layer, sizes.n_head, sizes.n_embd))
        bare.to_empty(device="cpu")
        bare.tie_weights()
        optimizer = make_optimizer(bare, self.config.optim, self.accelerator.device, "no")
        self.model, self.optimizer = self.accelerator.prepare(bare, optimizer)
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter.to_local(), std=0.02)
            moments = {key: torch.rand_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {**moments, "step": torch.tensor(1.0)}
        self.writers = writers_of(self.accelerator, self.model, place, 600.0, own_disks=False)
        assert self.writers.group is not None
        self.room = available_memory() // 4
        self.group = dist.new_group(backend="gloo")

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    def run(self, way: str) -> tuple[float, float, float, int]:
        """Seconds held, until durable and for a restore, and bytes."""
        folder = self.place / way
        held, durable, restore = (self._saved if way == "async_save" else self._written)(
            way, folder
        )
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if self.is_main:
            for path in (path for path in folder.rglob("*") if path.is_file()):
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
        seconds = self._timed(restore)
        if self.is_main:
            shutil.rmtree(folder)
        return held, durable, seconds, size

    def _written(self, way: str, folder: Path) -> tuple[float, float, Callable[[], object]]:
        from threading import Thread

        from data.tokenizer import CharTokenizer
        from snapshot.disk.folder import folder_name, verify
        from snapshot.disk.load import restore
        from snapshot.disk.save import Snapshot, Writers
        from snapshot.disk.state import RunState

        state = RunState("run", "attempt", 1, 0, 0, None, {"optim": {"name": "adamw"}}, {})
        self.accelerator.wait_for_everyone()
        begun = time.perf_counter()
        optimizer = self.optimizer.optimizer
        snapshot = Snapshot(
            folder,
            state,
            self.model,
            optimizer,
            CharTokenizer("abc").save,
            piece_bytes=self.config.snapshot.piece_bytes,
            writers=Writers(self.writers.rank) if way == "gathered" else self.writers,
        )
        room = self.room if way == "copies" else 0
        thread = Thread(target=snapshot.write, args=(lambda: room,))
        thread.start()
        snapshot.release()
        held = time.perf_counter() - begun
        thread.join()
        self.accelerator.wait_for_everyone()
        durable = time.perf_counter() - begun

        def back() -> None:
            self.optimizer.state.clear()  # at a resume there are no moments yet
            if self.is_main:
                verify(folder / folder_name(1))
            self.accelerator.wait_for_everyone()
            restore(folder / folder_name(1), self.model, self.optimizer.optimizer)

        return held, durable, back

    def _saved(self, _: str, folder: Path) -> tuple[float, float, Callable[[], object]]:
        import torch.distributed.checkpoint as dcp

        names = {one: name for name, one in self.model.named_parameters()}
        state = {"model": {name: one.detach() for one, name in names.items()}}
        state["optimizer"] = {
            f"{name}.{key}": value
            for one, name in names.items()
            for key, value in self.optimizer.state[one].items()
        }
        self.accelerator.wait_for_everyone()
        begun = time.perf_counter()
        future = dcp.async_save(state, checkpoint_id=folder, process_group=self.group)
        held = time.perf_counter() - begun
        future.result()
        self.accelerator.wait_for_everyone()
        durable = time.perf_counter() - begun
        return held, durable, lambda: dcp.load(state, checkpoint_id=folder)

    def dd(self, size: int) -> float:
        """Seconds that `dd` takes for so many bytes."""
        begun = time.perf_counter()
        if self.is_main:
            path = self.place / "dd"
            words = ("if=/dev/zero", f"of={path}", "bs=8M", f"count={size >> 23}", "conv=fsync")
            subprocess.run(["dd", *words], check=True, stderr=subprocess.DEVNULL)
            path.unlink()
        self.accelerator.wait_for_everyone()
        return time.perf_counter() - begun

    def _timed(self, work: Callable[[], object]) -> float:
        self.accelerator.wait_for_everyone()
        begun = time.perf_counter()
        work()
        self.accelerator.wait_for_everyone()
        return time.perf_counter() - begun


def main() -> None:
    """One of the processes."""
    model, turns, place, *ways = sys.argv[1:]
    bench = Bench(model, Path(place))
    figures: Figures = {}
    size = 0
    for turn in range(int(turns)):
        for way in ways if turn % 2 else ways[::-1]:
            held, durable, restore, size = bench.run(way)
            of_way = figures.setdefault(way, {"held": [], "durable": [], "restore": []})
            for kind, seconds in (("held", held), ("durable", durable), ("restore", restore)):
                of_way[kind].append(seconds)
            if bench.is_main:
                print(f"{way}: {held:.2f} {durable:.2f} {restore:.2f}", file=sys.stderr, flush=True)
        figures.setdefault("dd", {"durable": []})["durable"].append(bench.dd(size))
    if bench.is_main:
        print("@ " + json.dumps({"bytes": size, "figures": figures}), flush=True)
    bench.accelerator.wait_for_everyone()
    os._exit(0)


if __name__ == "__main__":
    main()
