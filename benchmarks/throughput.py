"""Tokens per second of train.py, compared with a minimal loop and other trainers.

    OMP_NUM_THREADS=1 python benchmarks/throughput.py --other nanogpt=<checkout of nanoGPT>

All run in turns on one machine, each in a separate process that computes only in its turn, so that
drift of the machine's speed affects all alike. `TFLOP/s` counts the matrix products of the passes.
It is compared with a plain matrix product of the same precision, measured in the same turns, and on
known GPUs with the published peak.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import (
    ROOT,
    SHAPES,
    as_words,
    flops_per_token,
    machine,
    median,
    overrides,
    print_table,
    save,
    spread,
)
from turns import Contestant, other, ours, take_turns

sys.path.insert(0, str(ROOT))
from training.reporting.speed import published_peak

HEADERS = (
    "contestant",
    "precision",
    "ms a step",
    "tokens/s",
    "TFLOP/s",
    "of a product here",
    "of the peak",
    "ours / this",
    "peak MB",
)


def contest(shape: dict[str, int], options: argparse.Namespace, folder: Path) -> list[Contestant]:
    """All contestants of a shape, after their turns. The first is train.py."""
    settings = {
        **shape,
        "source": options.source,
        "cache": str(folder / "data"),
        "compile": options.compile,
        "precision": options.precision,
        "dropout": options.dropout,
    }
    words = [*overrides(shape, options.dropout), f"data.source={options.source}", *options.words]
    launch = (f"--mixed_precision={options.precision}",)
    if options.compile:
        launch += ("--dynamo_backend=inductor", "--dynamo_use_regional_compilation")
    else:
        launch += ("--dynamo_backend=no",)  # even if the config file enables it
    started: list[Contestant] = []
    try:
        started.append(ours("train.py", options.config, words, folder, launch))
        started.append(other("bare loop", "bare", settings))
        for given in options.other:
            name, path = given.split("=", 1)
            for precision in dict.fromkeys((options.other_precision, options.precision)):
                theirs = {**settings, "path": path, "precision": precision}
                started.append(other(f"{name} {precision}", name, theirs))
        started.append(other("product", "product", settings))
        take_turns(started, options.steps, options.turns, options.warm_up)
    finally:
        for contestant in started:
            contestant.end()
    return started


def rows_of(
    started: list[Contestant], shape: dict[str, int], precision: str
) -> tuple[list[list[str]], list[dict[str, Any]]]:
    *trainers, product = started
    peak = published_peak(machine().get("gpu", ""), precision)
    per_second = product.facts["flops"] / median(product.seconds)
    rows, figures = [], []
    for one in trainers:
        seconds = median(one.seconds)
        flops = flops_per_token(one.facts["parameters"], shape)
        tokens = shape["batch"] * shape["block_size"]
        reached = flops * tokens / seconds
        ratios = [
            theirs / mine for theirs, mine in zip(one.seconds, started[0].seconds, strict=True)
        ]
        rows.append(
            [
                one.name,
                precision if not one.name.endswith((" no", " bf16")) else one.name.split()[-1],
                spread([1e3 * value for value in one.seconds], 1),
                f"{tokens / seconds:,.0f}",
                f"{reached / 1e12:.3f}",
                f"{reached / per_second:.0%}",
                "" if peak is None else f"{reached / peak:.0%}",
                spread(ratios),
                f"{one.memory:,.0f}" if one.memory else "",
            ]
        )
        figures.append({"name": one.name, **one.facts, "seconds": one.seconds, "ratios": ratios})
    figures.append({"name": "product", **product.facts, "seconds": product.seconds})
    return rows, figures


def main() -> None:
    """A table for each shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["large", "small"], choices=sorted(SHAPES))
    parser.add_argument("--batch", type=int, help="sequences a step, instead of the shape's")
    parser.add_argument("--precision", default="no", choices=("no", "bf16"))
    parser.add_argument(
        "--other-precision", choices=("no", "bf16"), help="additional, of the other trainers"
    )
    parser.add_argument("--dropout", type=float, default=0.0, help="for all")
    parser.add_argument("--config", default="cpu.yaml", help="in accelerate_configs/")
    parser.add_argument("--compile", action="store_true", help="all contestants, with inductor")
    parser.add_argument("--other", nargs="*", default=[], metavar="NAME=PATH")
    parser.add_argument("--source", default="python-docs", help="data.source, for all")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, help="a turn; by default about two seconds")
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--words", nargs="*", default=[], help="more for train.py: key=value")
    options = parser.parse_args()
    options.other_precision = options.other_precision or options.precision
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    print(as_words(machine()))
    requested_steps, all_figures = options.steps, {}
    for name in options.shapes:
        shape = {**SHAPES[name], **({"batch": options.batch} if options.batch else {})}
        options.steps = requested_steps or {"small": 60, "large": 3, "gpt2": 10}[name]
        with tempfile.TemporaryDirectory() as folder:
            started = contest(shape, options, Path(folder))
        rows, all_figures[name] = rows_of(started, shape, options.precision)
        print(f"\n{name}: {shape}, {options.turns} turns of {options.steps} steps")
        print_table(HEADERS, rows)
        product = started[-1]
        limit = product.facts["flops"] / median(product.seconds) / 1e9
        print(f"A product of matrices: {limit:,.0f} GFLOP/s.")
    kind = options.precision
    kind += "-dropout" if options.dropout else ""
    save(f"throughput-{kind}", all_figures)


if __name__ == "__main__":
    sys.exit(main())
