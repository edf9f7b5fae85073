"""Preparation of text with subwords: speed next to that of `tokenizers` alone, and peak memory.

    python benchmarks/tokenizing.py --megabytes 100 1000

Writes a text of each size, copies of the standard library's source, to a temporary folder. New
processes prepare it with `data.tokenizer=bpe:8000`. In turns with them others call only
`encode_batch_fast`, with the same tokenizer, chunks and cores, and nothing is done with its result.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, as_words, machine, median, print_table, save, spread

sys.path.insert(0, str(ROOT))


def write_text(path: Path, megabytes: int) -> None:
    """Copies of the standard library's source."""
    from data.sources import open_source

    pieces = open_source("python-stdlib", "text", path.parent).read()
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


def encode_only(source: str, cache: str) -> dict:
    """Seconds within `encode_batch_fast`, for the batches of the preparation."""
    from tokenizers import Tokenizer

    from data.chunks import batches_of, chunks_of
    from data.sources import open_source

    tokenizer = Tokenizer.from_file(str(Path(cache) / "tokenizer.json"))
    opened = open_source(source, "text", Path(cache))
    cut = int(sum(len(piece["text"]) for piece in opened.read()) * 0.9)
    seconds = 0.0
    for batch in batches_of(chunks_of(opened.read(), cut), len(os.sched_getaffinity(0))):
        texts = [chunk.text for chunk in batch]
        started_at = time.perf_counter()
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        seconds += time.perf_counter() - started_at
        del encoded
    return {"encoding_seconds": seconds}


def in_new_process(work: str, *arguments: str) -> dict:
    result = subprocess.run(
        [sys.executable, __file__, "--work", work, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"},
    )
    return json.loads(result.stdout.splitlines()[-1])


def measure(megabytes: int, turns: int, tokenizer: str) -> dict:
    """Prepare and encode a text in turns."""
    found: dict[str, list[dict]] = {"prepare": [], "encode": []}
    with tempfile.TemporaryDirectory() as folder:
        source, cache = Path(folder) / "text.txt", Path(folder) / "cache"
        write_text(source, megabytes)
        size = source.stat().st_size / 1e6
        for _ in range(turns):
            shutil.rmtree(cache, ignore_errors=True)
            cache.mkdir()
            found["prepare"].append(in_new_process("prepare", str(source), str(cache), tokenizer))
            found["encode"].append(in_new_process("encode", str(source), str(cache)))
            print(f"{megabytes} MB: {[one[-1] for one in found.values()]}", file=sys.stderr)
    return {"megabytes": size, **found}


def main() -> None:
    """Print a row for each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokenizer", default="bpe:8000")
    parser.add_argument("--work", choices=("prepare", "encode"), help=argparse.SUPPRESS)
    parser.add_argument("paths", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work = {"prepare": prepare, "encode": encode_only}[options.work]
        print(json.dumps(work(*options.paths)))
        return
    print(as_words(machine()))
    rows, figures = [], []
    for megabytes in options.megabytes:
        found = measure(megabytes, options.turns, options.tokenizer)
        size = found["megabytes"]
        ours, theirs = (
            [size / one["encoding_seconds"] for one in found[work]]
            for work in ("prepare", "encode")
        )
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        prepared = found["prepare"]
        rows.append(
            (
                f"{size:,.0f}",
                spread(ours, 1),
                spread(theirs, 1),
                spread(ratios, 2),
                spread([one["seconds"] for one in prepared], 1),
                f"{median([one['peak_mb'] for one in prepared]):,.0f}",
                f"{median([one['imports_mb'] for one in prepared]):,.0f}",
            )
        )
        figures.append({**found, "ratios": ratios})
    print_table(
        (
            "MB",
            "encoded and written, MB/s",
            "tokenizers alone, MB/s",
            "ratio",
            "whole preparation, s",
            "peak MB",
            "of which imports",
        ),
        rows,
    )
    save("tokenizing", figures)


if __name__ == "__main__":
    main()
