"""What benchmarks/gpu.py measures, and the process that measures it.

The process reads an item's name and settings as a line of JSON from standard input, and answers
with a line: the rows of a table, or an error. Whatever else is printed goes to standard error. What
computes is imported only there: benchmarks/gpu.py needs nothing but the list.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from harness import SHAPES, overrides

MICRO_BATCHES = (16, 32, 64, 8, 4)
Row = dict[str, Any]
"""The cells of a row of a table, by their headers."""
VOCABULARY = 50_304
"""GPT-2's 50,257, rounded up to a multiple of 64 as nanoGPT does: tensor cores need multiples."""
REHEARSED = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 32, "batch": 4}


@dataclass(frozen=True)
class Settings:
    """Of the whole command."""

    folder: str
    """For texts, runs and logs."""
    nanogpt: str | None = None
    """A checkout of nanoGPT."""
    rehearse: bool = False
    """Tiny shapes on the CPU instead of GPT-2 on a GPU."""

    @property
    def shape(self) -> dict[str, int]:
        return REHEARSED if self.rehearse else SHAPES["gpt2"]

    @property
    def vocabulary(self) -> int:
        return 512 if self.rehearse else VOCABULARY

    @property
    def backend(self) -> str:
        """The compiler; in a rehearsal one that only traces, because inductor takes minutes."""
        return "aot_eager" if self.rehearse else "inductor"

    @property
    def seconds(self) -> float:
        """How long an in-process measurement takes, without its warm-up."""
        return 0.2 if self.rehearse else 3.0

    def words(self, batch: int | None = None) -> tuple[str, ...]:
        """The overrides of train.py for the main shape."""
        return tuple(overrides({**self.shape, "batch": batch or self.shape["batch"]}))

    def preset(self, name: str, batch: int, checkpointing: bool) -> tuple[str, ...]:
        """The overrides of train.py for a preset; in a rehearsal for the tiny shape."""
        words = (f"model={name}", "model.dropout=0.0", "data.block_size=1024")
        words += (f"train.global_batch_size={batch}",)
        words = self.words(2) if self.rehearse else words
        return (*words, f"model.activation_checkpointing={str(checkpointing).lower()}")


@dataclass(frozen=True)
class Item:
    """One measurement."""

    name: str
    group: str
    """The table that its rows belong to."""
    seconds: float
    """Its share of the time, after which it is ended."""
    work: Callable[[Settings], list[Row]]


def rows_of(module: str, function: str, *given: Any) -> Callable[[Settings], list[Row]]:
    """An item that a function of another file measures, imported where it computes."""

    def work(settings: Settings) -> list[Row]:
        rows: list[Row] = getattr(import_module(module), function)(settings, *given)
        return rows

    return work


def deterministic(settings: Settings) -> list[Row]:
    from gpu_steps import Case
    from gpu_steps import deterministic as rows

    eager = Case(settings.words(), settings.vocabulary)
    compiled = replace(eager, backend=settings.backend)
    return [row for case in (compiled, eager) for row in rows(case, settings.seconds)]


def updates(
    words: Callable[[Settings], tuple[str, ...]], compile_too: bool = False, **options: Any
) -> Callable[[Settings], list[Row]]:
    """An item of updates in the measuring process, eager and perhaps compiled by block."""

    def work(settings: Settings) -> list[Row]:
        from gpu_steps import Case, measure

        eager = Case(words(settings), settings.vocabulary, **options)
        cases = [eager, replace(eager, backend=settings.backend)] if compile_too else [eager]
        return [measure(case, settings.seconds) for case in cases]

    return work


def _sweep(batch: int) -> Item:
    work = updates(
        lambda settings: settings.words(max(1, batch // 8) if settings.rehearse else batch), True
    )
    return Item(f"micro-batch {batch}", "micro-batches", 90, work)


def _large(name: str, checkpointing: bool) -> Item:
    words = "with checkpointing" if checkpointing else "without checkpointing"
    work = updates(lambda settings: settings.preset(name, 8, checkpointing))
    return Item(f"{name} {words}", "large models", 60, work)


def _other(name: str, model: str, **options: Any) -> Item:
    work = updates(lambda settings: settings.preset(model, 8, False), **options)
    return Item(name, "other modes", 60, work)


def _frozen(kind: str) -> Item:
    work = updates(lambda settings: settings.preset("gpt2_large", 8, True), frozen=kind)
    return Item(f"adapters around {kind}", "adapters", 60, work)


ITEMS = (
    Item("tests", "correctness", 200, rows_of("gpu_runs", "pytest_rows")),
    Item("resume", "correctness", 240, rows_of("gpu_runs", "resume_rows")),
    Item("contest, compiled", "gpt2 compiled", 300, rows_of("gpu_contest", "contest_rows", True)),
    Item("contest, eager", "gpt2 eager", 120, rows_of("gpu_contest", "contest_rows", False)),
    Item("deterministic", "deterministic kernels", 120, deterministic),
    *map(_sweep, MICRO_BATCHES),
    *(_large(name, kind) for name in ("gpt2_large", "gpt2_xl") for kind in (False, True)),
    Item("snapshots", "snapshots", 240, rows_of("gpu_runs", "snapshot_rows")),
    _other("documents by a mask", "gpt2", documents=True),
    _other("fp16", "gpt2", precision="fp16"),
    _other("float32", "gpt2", precision="no"),
    _other("float32 in TF32", "gpt2", precision="no", tf32=True),
    *(
        _other(f"{kind}, compiled and not", "gpt2_large", compile_too=True, precision=kind)
        for kind in ("bf16", "fp8")
    ),
    _other("Muon", "gpt2", optimizer="muon"),
    _other("FSDP on one rank", "gpt2_large", fsdp=True),
    _other("FSDP on one rank, offloaded", "gpt2_large", fsdp=True, offload=True),
    Item("shared sequences", "context parallelism", 120, rows_of("gpu_runs", "context_rows")),
    Item("shared matrices", "tensor parallelism", 120, rows_of("gpu_runs", "matrix_rows")),
    *(_frozen(kind) for kind in ("float32", "bf16", "nf4")),
)
"""The most valuable first."""


def answer(items: tuple[Item, ...], request: dict[str, Any]) -> dict[str, Any]:
    """The rows of the requested item, or the error that it ended with."""
    (item,) = (item for item in items if item.name == request["item"])
    try:
        return {"rows": item.work(Settings(**request["settings"]))}
    except (Exception, SystemExit) as error:  # a contestant that ended exits
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[-2000:]}


def serve(items: tuple[Item, ...] = ITEMS) -> None:
    """Measure the requested items until the input ends."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what is printed, here and in child processes, is no answer
        for line in sys.stdin:
            print(json.dumps(answer(items, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    serve()
