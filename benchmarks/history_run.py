"""A run that has taken so many steps already, of which only the last update is real."""

from __future__ import annotations

import sys
from pathlib import Path

from harness import ROOT, SHAPES, overrides

sys.path.insert(0, str(ROOT))

EVERY = 50
"""Steps between evaluations, and between uploads."""
BATCHES = 200


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
        from config.stored import as_plain
        from data.token_file import TokenStream
        from data.tokenizer import CharTokenizer
        from model.gpt import GPT
        from snapshot.disk.state import RunState
        from training.step import make_optimizer

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
        plain = as_plain(self.config)
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
        from data.split import Split
        from model.head import IGNORED

        data, batch = self.config.data, self.config.train.global_batch_size
        windows = windows_of(self.stream, data.block_size, IGNORED, False)
        order = windows.order(self.config.train.seed, batch)
        loader = window_loader(windows, StepBatches(order, Split(batch), self.steps + 1))
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
        """What an upload sends of metrics.jsonl: all of it."""
        from training.reporting.metrics import metrics_up_to

        self.carried = len(metrics_up_to(self.dir / "metrics.jsonl", self.steps))

    def resume(self) -> None:
        """What a start does with the files of an earlier attempt."""
        from snapshot.disk.load import restore
        from snapshot.start import choose_start
        from training.reporting.console import Console
        from training.reporting.metrics import MetricsFile
        from training.reporting.report import Report
        from training.run.evaluations import BestSnapshot
        from training.run.writer import SnapshotWriter

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
        self.saving.begin(self.state, None, last=False, end=False)
        self.saving.finish()
        self.saving.end()
        assert (self.dir / "curves.png").exists()
