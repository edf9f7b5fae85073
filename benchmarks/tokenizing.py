"""Preparation of text with subwords: speed next to that of `tokenizers` alone, and peak memory.

    python benchmarks/tokenizing.py --megabytes 100 1000

Writes a text of each size, copies of the standard library's source, to a temporary folder. A new
process prepares it with `data.tokenizer=bpe:8000`. Another one then encodes and writes parts of
4 MB, in turns with calls of only `encode_batch_fast` for the same part, with the same tokenizer,
chunks and cores, whose result is dropped: the speed of a shared machine changes within a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from statistics import quantiles

from harness import ROOT, as_words, machine, print_table, save

sys.path.insert(0, str(ROOT))

PIECES = 4
"""Of 1 MiB, in a part."""


def write_text(path: Path, megabytes: int) -> None:
    """Copies of the standard library's source."""
    from data.columns import TextColumn
    from data.sources import open_source

    pieces = open_source("python-stdlib", TextColumn("text"), path.parent).read()
    text = "".join(piece["text"] for piece in pieces).encode()
    with open(path, "wb") as opened:
        for _ in range(megabytes * 1_000_000 // len(text) + 1):
            opened.write(text)


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def prepare(source: str, cache: str, tokenizer: str) -> dict:
    import torch  # noqa: F401 - a run imports it anyway, so it is not measured

    import data.prepare
    from data.corpus import prepare_corpus

    write_tokens, seconds = data.prepare._write_tokens, []

    def timed(*arguments: object) -> object:
        started_at = time.perf_counter()
        result = write_tokens(*arguments)
        seconds.append(time.perf_counter() - started_at)
        return result

    data.prepare._write_tokens = timed
    imports_mb, started_at = peak_mb(), time.perf_counter()
    corpus = prepare_corpus(
        source,
        text_column="text",
        val_fraction=0.1,
        block_size=64,
        cache_dir=Path(cache),
        tokenizer=tokenizer,
        threads=len(os.sched_getaffinity(0)),
    )
    total = time.perf_counter() - started_at
    corpus.tokenizer.save(Path(cache))
    return {
        "seconds": total,
        "encoding_seconds": seconds[0],
        "peak_mb": peak_mb(),
        "imports_mb": imports_mb,
        "tokens": corpus.info.tokens,
        "characters": corpus.info.characters,
    }


def compare(source: str, cache: str, seconds: str) -> dict:
    """Seconds of each part, encoded and written by us, and by `encode_batch_fast` alone."""
    from tokenizers import Tokenizer

    import data.prepare
    from data.columns import TextColumn
    from data.encode import encoded
    from data.pieces import batches_of, chunks_of
    from data.progress import Progress
    from data.sources import open_source
    from data.subwords import load_tokenizer

    cores, nowhere = len(os.sched_getaffinity(0)), 10**12
    ours = load_tokenizer(Path(cache))
    theirs = Tokenizer.from_file(str(Path(cache) / "tokenizer.json"))
    target = Path(cache) / "part"
    target.mkdir()

    def write(part: list) -> None:
        parts = encoded(part, ours, nowhere, cores)
        data.prepare._write_tokens(parts, target, ours, False, Progress())

    def encode(part: list) -> None:
        for batch in batches_of(chunks_of(part, nowhere), cores):
            texts = [chunk.text for chunk in batch]
            encoded = theirs.encode_batch_fast(texts, add_special_tokens=False)
            del encoded  # millions of small objects

    found: dict[str, list[float]] = {"ours": [], "theirs": []}
    works = [("ours", write), ("theirs", encode)]
    pieces = iter(open_source(source, TextColumn("text"), Path(cache)).read())
    end = time.perf_counter() + float(seconds)
    while part := list(islice(pieces, PIECES)):
        for name, work in works:
            started_at = time.perf_counter()
            work(part)
            found[name].append(time.perf_counter() - started_at)
        works.reverse()
        if time.perf_counter() > end:
            break
    return {name: times[1:] for name, times in found.items()}  # the first imports and warms up


def in_new_process(work: str, *arguments: str) -> dict:
    result = subprocess.run(
        [sys.executable, __file__, "--work", work, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"},
    )
    return json.loads(result.stdout.splitlines()[-1])


def measure(megabytes: int, tokenizer: str, seconds: float) -> dict:
    """Prepare a text, and encode it in turns with `tokenizers` alone."""
    with tempfile.TemporaryDirectory() as folder:
        source, cache = Path(folder) / "text.txt", Path(folder) / "cache"
        cache.mkdir()
        write_text(source, megabytes)
        prepared = in_new_process("prepare", str(source), str(cache), tokenizer)
        print(prepared, file=sys.stderr, flush=True)
        return {
            "megabytes": source.stat().st_size / 1e6,
            "prepare": prepared,
            **in_new_process("compare", str(source), str(cache), str(seconds)),
        }


def main() -> None:
    """Print a row for each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--seconds", type=float, default=120, help="for the comparison")
    parser.add_argument("--tokenizer", default="bpe:8000")
    parser.add_argument("--work", choices=("prepare", "compare"), help=argparse.SUPPRESS)
    parser.add_argument("paths", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work = {"prepare": prepare, "compare": compare}[options.work]
        print(json.dumps(work(*options.paths)))
        return
    print(as_words(machine()))
    rows, figures = [], []
    for megabytes in options.megabytes:
        found = measure(megabytes, options.tokenizer, options.seconds)
        ours, theirs, prepared = found["ours"], found["theirs"], found["prepare"]
        ratios = [other / mine for mine, other in zip(ours, theirs, strict=True)]
        low, middle, high = quantiles(ratios)
        rows.append(
            (
                f"{found['megabytes']:,.0f}",
                len(ratios),
                f"{PIECES * len(ours) * 1.048576 / sum(ours):.1f}",
                f"{PIECES * len(theirs) * 1.048576 / sum(theirs):.1f}",
                f"{sum(theirs) / sum(ours):.2f}",
                f"{middle:.2f} ({low:.2f}-{high:.2f})",
                f"{prepared['seconds']:.0f}",
                f"{prepared['peak_mb']:,.0f}",
                f"{prepared['imports_mb']:,.0f}",
            )
        )
        figures.append(found)
    print_table(
        (
            "MB",
            "parts of 4 MB",
            "encoded and written, MB/s",
            "tokenizers alone, MB/s",
            "ratio of all",
            "ratio of a part (quartiles)",
            "whole preparation, s",
            "peak MB",
            "of which imports",
        ),
        rows,
    )
    save("tokenizing", figures)


if __name__ == "__main__":
    main()
