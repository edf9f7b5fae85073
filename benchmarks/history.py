"""What grows with the steps that a run has taken; and verification compared with hashing.

    OMP_NUM_THREADS=1 python benchmarks/history.py [--turns 9] [--shape small]

One table over 100 to 1,000,000 steps: the first batch of a start there, a batch after it, an
update, a snapshot, a resume, and the metrics that an upload carries. All in one process, in turns.
Reported is the minimum CPU time of all turns, because other programs may use the machine. An upload
to a loopback Hub and the resident memory are of a process for each length (history_upload.py).
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from common import SHAPES, as_words, machine, print_table, save
from history_run import BATCHES, Run
from history_upload import measure

LENGTHS = (100, 1_000, 10_000, 100_000, 1_000_000)
KINDS = {
    "first batch": 1,
    "batch": BATCHES,
    "update": 1,
    "snapshot": 1,
    "resume": 1,
    "metrics of an upload": 1,
}
"""What is timed, and how often in one turn."""


<<<<<<< HEAD
def append_history(path: Path, before: int, steps: int) -> None:
    """Add the steps from `before` + 1 to `steps` to metrics.jsonl."""
    with open(path, "a") as opened:
        for step in range(before + 1, steps + 1):
            loss = 1 + 3 / step**0.3 + (step * 2654435761 % 1000) / 5000
            opened.write(
                f'{{"event": "train", "step": {step}, "loss": {loss}, "learning_rate": '
                f'{1e-3 - 1e-4 * step / steps}, "grad_norm": {0.3 + 1 / step}, '
                f'"tokens_per_second": 12345.6}}\n'
            )
            if step % EVERY == 0:
                opened.write(f'{{"event": "eval", "step": {step}, "loss": {loss + 0.1}}}\n')


class Run:
    """A run at a step, of which only the last update is real."""

    def __init__(self, root: Path, steps: int, shape: str) -> None:
        import torch
        from accelerate import Accelerator

        from config.compose import load_config
        from config.schema import gpt_config
        from data.stream import TokenStream
        from data.tokenizer import CharTokenizer
        from model.gpt import GPT
        from snapshot.disk.state import RunState
        from training.optimizer import make_optimizer

        self.dir, self.steps = root / str(steps), steps
        (self.dir / "snapshots").mkdir(parents=True)
        append_history(self.dir / "metrics.jsonl", 0, steps)
        words = [*overrides(SHAPES[shape]), f"run.dir={self.dir}", f"train.eval_every={EVERY}"]
        self.config = load_config([*words, "hub.repo_id=null"])
        tokenizer = CharTokenizer("".join(map(chr, range(32, 132))))
        size = self.config.data.block_size
        self.model = GPT(gpt_config(self.config, tokenizer.vocab_size))
        self.optimizer = make_optimizer(self.model, self.config.optim, torch.device("cpu"), "no")
        ids = torch.randint(tokenizer.vocab_size, (1, size))
        self.model(ids, ids).backward()
        self.optimizer.step()
        for state in self.optimizer.state.values():
            state["step"].fill_(steps)
        self.accelerator, self.tokenizer = Accelerator(cpu=True), tokenizer
        plain = {"run": {"name": "history"}, "model": {}}
        self.state = RunState("run", "attempt", steps, 0, 1337, None, plain, {})
        self.stream = TokenStream([torch.randint(tokenizer.vocab_size, (1 << 20,)).numpy()])

    def advance(self, steps: int) -> None:
        """Count so many steps more, without taking them."""
        self.steps += steps
        self.state.step = self.steps
        for state in self.optimizer.state.values():
            state["step"].fill_(self.steps)

    def first_batch(self) -> None:
        """Start the loader at the next step."""
        from data.loader import StepBatches, window_loader, windows_of
        from model.head import IGNORED

        data, batch = self.config.data, self.config.train.global_batch_size
        windows = windows_of(self.stream, data.block_size, IGNORED, False)
        order = windows.order(self.config.train.seed, batch)
        loader = window_loader(windows, StepBatches(order, batch, batch, self.steps + 1))
        self.batches = iter(loader)
        self.newest = next(self.batches)

    def batch(self) -> None:
        """The batches after it."""
        for _ in range(BATCHES):
            self.newest = next(self.batches)

    def update(self) -> None:
        """One step of the optimizer."""
        batch, _ = self.newest
        self.model(*batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for state in self.optimizer.state.values():
            state["step"].fill_(self.steps)

    def metrics_of_an_upload(self) -> None:
        """What is new in metrics.jsonl since the upload before."""
        from training.reporting.records import segments

        found, _ = segments(self.dir / "metrics.jsonl", self.steps - EVERY, self.steps)
        self.carried = sum(map(len, found.values()))

    def resume(self) -> None:
        """What a start does with the files of an earlier attempt."""
        from snapshot.disk.state import restore
        from snapshot.start import choose_start
        from training.reporting.console import Console
        from training.reporting.metrics import MetricsFile
        from training.reporting.report import Report
        from training.run.evaluations import BestSnapshot
        from training.run.saving import SnapshotWriter

        start = choose_start(self.dir, "auto")
        if start.folder is not None:
            restore(start.folder, self.model, self.optimizer)
        metrics = MetricsFile(self.dir / "metrics.jsonl", self.steps)
        self.report = Report(Console(True, self.steps, 0), metrics, 64, start.folder)
        arguments = (self.accelerator, self.config, self.model, self.optimizer)
        best = BestSnapshot(self.config, True, self.state, start)
        self.saving = SnapshotWriter(*arguments, self.tokenizer, self.report, best)

    def snapshot(self) -> None:
        """Write a snapshot, and draw the curves after it."""
        self.saving.begin(self.state, None, last=False, stopping=False)
        self.saving.finish()
        self.saving.end()
        assert (self.dir / "curves.png").exists()


=======
>>>>>>> 340c028 (Limits of length are printed as advice; no benchmark imports itself through others)
def histories(turns: int, shape: str) -> None:
    """Print the cost of everything after 100 to 1,000,000 steps."""
    seconds: dict[str, dict[int, list[float]]] = {
        kind: {steps: [] for steps in LENGTHS} for kind in KINDS
    }
    megabytes: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as place:
        runs = [Run(Path(place), steps, shape) for steps in LENGTHS]
        for run in runs:  # warm-up: files of that size exist, and all modules are imported
            run.resume()
            run.snapshot()
            run.metrics_of_an_upload()
        for _ in range(turns):
            for run in runs:
                for kind, times in KINDS.items():
                    work = getattr(run, kind.replace(" ", "_"))
                    seconds[kind][run.steps].append(timed(work) / times)
        for run in runs:
            tracemalloc.start()
            run.resume()
            run.snapshot()
            megabytes[run.steps] = tracemalloc.get_traced_memory()[1] / 1e6
            tracemalloc.stop()
        carried = {run.steps: run.carried for run in runs}
    alone = {steps: measure(steps, shape) for steps in LENGTHS}
    rows = []
    for steps in LENGTHS:
        figures = [1e3 * min(seconds[kind][steps]) for kind in KINDS]
        first = [1e3 * min(seconds[kind][LENGTHS[0]]) for kind in KINDS]
        cells = [f"{a:.3g} ({a / b:.2f})" for a, b in zip(figures, first, strict=True)]
        rows.append(
            (
                f"{steps:,}",
                *cells,
                f"{1e3 * alone[steps]['upload']:.0f}",
                f"{carried[steps] / 1e6:.2f}",
                f"{megabytes[steps]:.1f}",
                f"{alone[steps]['resident']:.0f}",
            )
        )
    heads = [f"{kind}, ms" for kind in KINDS]
    more = ("upload, ms", "MB of metrics an upload", "Python's peak, MB", "resident, MB")
    print_table(("steps", *heads, *more), rows)
    figures = {"seconds": seconds, "megabytes": megabytes, "carried": carried, "alone": alone}
    save("history", figures)


def verifications(turns: int, shape: str) -> None:
    """Print the cost of verifying a snapshot, compared with hashing its files."""
    from snapshot.disk.files import verify
    from snapshot.disk.numbers import NumberChecks

    with tempfile.TemporaryDirectory() as place:
        run = Run(Path(place), 100, shape)
        run.resume()
        run.snapshot()
        folder = run.report.last_snapshot
        assert folder is not None
        times: dict[str, list[float]] = {"sha256": [], "verify": [], "numbers": []}
        for _ in range(turns):
            times["sha256"].append(timed(lambda: hash_all(folder)))
            times["verify"].append(timed(lambda: verify(folder)))
            times["numbers"].append(
                timed(lambda: verify(folder, inspector_for=NumberChecks().inspector_for))
            )
        size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    figures = {kind: min(seconds) for kind, seconds in times.items()}
    cells = [f"{figure:.3f} ({figure / figures['sha256']:.2f})" for figure in figures.values()]
    names = ("MB", "sha256 alone, s", "as the manifest says, s", "and the numbers, s")
    print_table(names, [(f"{size:.0f}", *cells)])
    save("snapshots-verify", times)


def hash_all(folder: Path) -> None:
    """Read and hash all files."""
    for file in folder.iterdir():
        with open(file, "rb") as opened:
            hashlib.file_digest(opened, "sha256")


def timed(work: Callable[[], object]) -> float:
    """CPU seconds of all threads."""
    started_at = time.process_time()
    work()
    return time.process_time() - started_at


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--shape", default="small", choices=SHAPES)
    options = parser.parse_args()
    print(as_words(machine()))
    histories(options.turns, options.shape)


if __name__ == "__main__":
    main()
