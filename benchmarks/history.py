"""The cost of a snapshot and a resume after many steps, and of verification compared with hashing.

All in one process, in turns. Reported is the minimum CPU time of all turns, because other programs
may use the machine.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from common import ROOT, SHAPES, overrides, print_table, save

sys.path.insert(0, str(ROOT))

LENGTHS = (100, 10_000, 1_000_000)
EVERY = 50
"""Steps between evaluations."""


def write_history(path: Path, steps: int) -> None:
    """Write metrics.jsonl of a run of `steps` steps."""
    with open(path, "w") as opened:
        for step in range(1, steps + 1):
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
        from data.tokenizer import CharTokenizer
        from model.gpt import GPT, GPTConfig
        from training.optimizer import adamw

        self.dir, self.steps = root / str(steps), steps
        (self.dir / "snapshots").mkdir(parents=True)
        write_history(self.dir / "metrics.jsonl", steps)
        words = [*overrides(SHAPES[shape]), f"run.dir={self.dir}", f"train.eval_every={EVERY}"]
        self.config = load_config([*words, "hub.repo_id=null"])
        tokenizer = CharTokenizer("".join(map(chr, range(32, 132))))
        size = self.config.data.block_size
        self.model = GPT(GPTConfig(tokenizer.vocab_size, size, **vars(self.config.model)))
        self.optimizer = adamw(self.model, self.config.optim, torch.device("cpu"))
        ids = torch.randint(tokenizer.vocab_size, (1, size))
        self.model(ids, ids).backward()
        self.optimizer.step()
        for state in self.optimizer.state.values():
            state["step"].fill_(steps)
        self.accelerator, self.save_tokenizer = Accelerator(cpu=True), tokenizer.save

    def resume(self) -> None:
        """What a start does with the files of an earlier attempt."""
        from snapshot.disk.state import restore
        from snapshot.resume import choose_start
        from training.reporting.console import Console
        from training.reporting.metrics import MetricsFile
        from training.reporting.report import Report
        from training.run.saving import SnapshotWriter

        start = choose_start(self.dir, "auto")
        if start.folder is not None:
            restore(start.folder, self.model, self.optimizer)
        metrics = MetricsFile(self.dir / "metrics.jsonl", self.steps)
        self.report = Report(Console(True, self.steps, 0), metrics, 64, start.folder)
        arguments = (self.accelerator, self.config, self.model, self.optimizer)
        self.saving = SnapshotWriter(*arguments, self.save_tokenizer, self.report)

    def snapshot(self) -> None:
        """Write a snapshot, and draw the curves after it."""
        from snapshot.disk.state import RunState

        plain = {"run": {"name": "history"}}
        state = RunState("run", "attempt", self.steps, 0, 1337, None, plain, {})
        self.saving.begin(state, None, last=False, stopping=False)
        self.saving.finish()
        self.saving.end()
        assert (self.dir / "curves.png").exists()


def histories(turns: int, shape: str) -> None:
    """Print the cost of a snapshot and a resume after 100, 10,000 and 1,000,000 steps."""
    seconds: dict[str, dict[int, list[float]]] = {
        kind: {steps: [] for steps in LENGTHS} for kind in ("snapshot", "resume")
    }
    megabytes: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as place:
        runs = [Run(Path(place), steps, shape) for steps in LENGTHS]
        for run in runs:  # warm-up: files of that size exist, and all modules are imported
            run.resume()
            run.snapshot()
        for _ in range(turns):
            for run in runs:
                seconds["resume"][run.steps].append(timed(run.resume))
                seconds["snapshot"][run.steps].append(timed(run.snapshot))
        for run in runs:
            tracemalloc.start()
            run.resume()
            run.snapshot()
            megabytes[run.steps] = tracemalloc.get_traced_memory()[1] / 1e6
            tracemalloc.stop()
    rows = []
    for steps in LENGTHS:
        figures = [min(seconds[kind][steps]) for kind in ("snapshot", "resume")]
        first = [min(seconds[kind][LENGTHS[0]]) for kind in ("snapshot", "resume")]
        cells = [f"{a:.3f} ({a / b:.2f})" for a, b in zip(figures, first, strict=True)]
        rows.append((f"{steps:,}", *cells, f"{megabytes[steps]:.1f}"))
    print_table(("steps", "snapshot, s (of the first)", "resume, s", "Python's peak, MB"), rows)
    save("snapshots-history", {"seconds": seconds, "megabytes": megabytes})


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
