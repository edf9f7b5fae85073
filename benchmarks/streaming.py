"""Tokens per second of a streamed data set, compared with other loaders.

    python benchmarks/streaming.py --peers /path/to/python

Reads the same files with ours, `datasets`, litdata and mosaicml-streaming; --peers names a Python
that has the last two.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from harness import ROOT, as_words, machine, print_table, save
from pyarrow import parquet

sys.path.insert(0, str(ROOT))
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"

ROW_BYTES = 2000


def made_up_rows(count: int, seed: int = 7) -> Iterator[str]:
    """Rows of made-up words."""
    chosen = random.Random(seed)
    words = ["".join(chosen.choices("etaoinshrdlu", k=chosen.randrange(2, 9))) for _ in range(5000)]
    for _ in range(count):
        yield " ".join(chosen.choices(words, k=ROW_BYTES // 6))


def write_text(folder: Path, megabytes: int) -> None:
    """Parquet files of 25 MB, and a tokenizer of 8,000 tokens."""
    from data.chunks import chunks_of
    from data.subwords import train_bpe

    rows = 25_000_000 // ROW_BYTES
    (folder / "data").mkdir()
    for part in range(megabytes // 25):
        table = pa.table({"text": list(made_up_rows(rows, seed=part))})
        parquet.write_table(table, folder / "data" / f"{part}.parquet", row_group_size=1000)
    texts = ((text, True) for text in made_up_rows(2000))
    train_bpe(8000, chunks_of(texts), 2000 * ROW_BYTES).save(folder)


def in_new_process(python: str, name: str, folder: Path, tokens: int) -> Any:
    # -P: MosaicML's package has the name of this file.
    script = str(Path(__file__).with_name("streaming_loaders.py"))
    result = subprocess.run(
        [python, "-P", script, name, str(folder), str(tokens)],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise SystemExit(result.stderr[-2000:])
    return json.loads(result.stdout.splitlines()[-1])


def loader(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each loader cold, with its preparation, and then warm, in turns."""
    names = ["ours", "datasets", *(["litdata", "mosaicml"] if options.peers else [])]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_text(folder, options.megabytes)

        def timed(name: str, tokens: int = options.tokens) -> Any:
            python = sys.executable if name in ("ours", "datasets") else options.peers
            found = in_new_process(python, name, folder, tokens)
            print(name, json.dumps(found), file=sys.stderr, flush=True)
            return found

        cold = {name: timed(name) for name in names}
        timed("ours", tokens=0)  # fills the cache, of which a pass needs less than four epochs
        warm: dict[str, list[Any]] = {name: [] for name in names}
        for _ in range(options.repeats):
            for name in names:
                warm[name].append(timed(name))
    found = [figures_of(name, cold[name], warm[name]) for name in names]
    rows = []
    for one in found:
        _, *values = one.values()
        rows.append([one["loader"], *(f"{v:,.{0 if v > 100 else 1}f}" for v in values)])
    print_table(list(found[0]), rows)
    return found


def figures_of(name: str, cold: Any, warm: list[Any]) -> dict[str, Any]:
    """The figures of a loader: of several passes the median, and of the speeds both ends."""
    speeds = sorted(one["tokens"] / one["read"] for one in warm)
    firsts = [one["prepare"] + one["first"] for one in warm]
    return {
        "loader": name,
        "cold, tokens/s": cold["tokens"] / (cold["prepare"] + cold["read"]),
        "warm, tokens/s": statistics.median(speeds),
        "lowest": speeds[0],
        "highest": speeds[-1],
        "warm, median stretch": statistics.median(one["steady"] for one in warm),
        "first batch, cold, s": cold["prepare"] + cold["first"],
        "first batch, warm, s": statistics.median(firsts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", help="a Python with litdata and mosaicml-streaming")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print(as_words(machine()))
    save("streaming_loader", loader(options))


if __name__ == "__main__":
    main()
