"""Preparation of text: MB/s and peak memory; and the loader's cost for a large corpus.

    OMP_NUM_THREADS=1 python benchmarks/data.py --megabytes 10 100 1000 4000
    OMP_NUM_THREADS=1 python benchmarks/data.py --megabytes 100 --tokenizer bpe:8000

Writes a generated text of each size to a temporary folder and measures its preparation in new
process. Then another one reads 2,000 batches of it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import ROOT, as_words, machine, print_table, save

sys.path.insert(0, str(ROOT))

BATCHES, BATCH, BLOCK = 2000, 12, 64


def write_text(path: Path, megabytes: int) -> None:
    """Sentences of made-up words over 60 characters, one byte each, with some of three."""
    chosen = random.Random(11)
    letters = "etaoinshrdlucmfwypvbgkjqxzETAOINSHRDLUCMFWYPVBGKJQXZ0123456789"
    words = ["".join(chosen.choices(letters, k=chosen.randrange(1, 11))) for _ in range(5000)]
    piece = " ".join(chosen.choices(words, k=170_000)).replace("qz", "\u2014") + ".\n"
    encoded = piece.encode()
    with open(path, "wb") as opened:
        for _ in range(megabytes * 1_000_000 // len(encoded) + 1):
            opened.write(encoded)


def prepare(source: str, cache: str, tokenizer: str) -> dict:
    import torch  # noqa: F401 - a run imports it anyway, so it is not measured

    import data.prepare
    import data.reading.text  # noqa: F401
    from config.schema import DataConfig
    from data.corpus import prepare_corpus

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started_at = time.perf_counter()
    prepare_corpus(DataConfig(source, block_size=BLOCK, cache_dir=cache), tokenizer)
    seconds = time.perf_counter() - started_at
    return {
        "seconds": seconds,
        "megabytes_per_second": Path(source).stat().st_size / 1e6 / seconds,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "imports_mb": before / 1e3,
    }


def load(source: str, cache: str, tokenizer: str) -> dict:
    from config.schema import DataConfig
    from data.corpus import prepare_corpus
    from data.loader import StepBatches, Windows, window_loader
    from data.order import BlockOrder
    from data.split import Split

    corpus = prepare_corpus(DataConfig(source, block_size=BLOCK, cache_dir=cache), tokenizer)
    order = BlockOrder(len(corpus.train), BLOCK, seed=1)
    anonymous = anonymous_mb()

    def first_batch_seconds(step: int) -> float:
        started_at = time.perf_counter()
        batches = StepBatches(order, Split(BATCH), first_step=step)
        next(iter(window_loader(Windows(corpus.train, BLOCK, -100), batches)))
        return time.perf_counter() - started_at

    first_batch_seconds(1)
    pairs = [(first_batch_seconds(1), first_batch_seconds(1_000_000)) for _ in range(300)]
    ratios = sorted(late / early for early, late in pairs)

    chosen = StepBatches(order, Split(BATCH), first_step=1)
    batches = iter(window_loader(Windows(corpus.train, BLOCK, -100), chosen))
    next(batches)
    started_at = time.perf_counter()
    for _ in range(BATCHES):
        next(batches)
    seconds = time.perf_counter() - started_at
    return {
        "start_ratio": ratios[len(ratios) // 2],
        "loader_tokens_per_second": BATCHES * BATCH * BLOCK / seconds,
        "own_memory_growth_mb": anonymous_mb() - anonymous,
    }


def anonymous_mb() -> float:
    """Anonymous memory of the process, without pages of files, which the system can reclaim."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1e3
    return float("nan")


def in_new_process(work: str, *arguments: str) -> dict:
    result = subprocess.run(
        [sys.executable, __file__, "--work", work, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"},
    )
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--tokenizer", default="char", help="data.tokenizer")
    parser.add_argument("--work", choices=("prepare", "load"), help=argparse.SUPPRESS)
    parser.add_argument("paths", nargs="*", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    if options.work:
        work = {"prepare": prepare, "load": load}[options.work]
        print(json.dumps(work(*options.paths, *rest)))
        return
    print(as_words(machine()))
    rows, figures = [], []
    for megabytes in options.megabytes:
        with tempfile.TemporaryDirectory() as folder:
            source = str(Path(folder) / "text.txt")
            write_text(Path(source), megabytes)
            prepared = in_new_process("prepare", source, folder, options.tokenizer)
            loading = in_new_process("load", source, folder, options.tokenizer)
        figures.append({"megabytes": megabytes, "prepared": prepared, **loading})
        print(json.dumps(figures[-1]), file=sys.stderr, flush=True)
        rows.append(
            (
                f"{megabytes:,}",
                f"{prepared['megabytes_per_second']:.0f}",
                f"{prepared['peak_mb']:.0f}",
                f"{prepared['imports_mb']:.0f}",
                f"{loading['loader_tokens_per_second']:,.0f}",
                f"{loading['start_ratio']:.2f}",
                f"{loading['own_memory_growth_mb']:.1f}",
            )
        )
    print_table(
        (
            "MB",
            "MB/s",
            "peak MB",
            "of which imports",
            "loader tokens/s",
            "start at step 1,000,000 / 1",
            "own memory of 2,000 batches, MB",
        ),
        rows,
    )
    save("data" if options.tokenizer == "char" else "data-subwords", figures)


if __name__ == "__main__":
    main()
