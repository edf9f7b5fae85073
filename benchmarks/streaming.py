"""A streamed data set: rows after kills, tokens per second, and a start in the middle.

    python benchmarks/streaming.py resume
    python benchmarks/streaming.py loader --peers /path/to/python
    python benchmarks/streaming.py start
    python benchmarks/streaming.py waits

`resume` reads two data sets mixed 0.7 and 0.3, is killed twenty times, and counts the rows that a
reader of `datasets` (interleave_datasets, shuffle, state_dict) and ours see twice or never.
`loader` reads the same files with ours, `datasets`, litdata and mosaicml-streaming; --peers names a
Python that has the last two. `start` begins at step 1,000,000 of 10 GB, 100 names of one file.
`waits` trains the default model on a data set of a loopback Hub: the share of a step that waits.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import as_words, machine, print_table, save
from streaming_kills import resume
from streaming_texts import ROW_BYTES, made_up_rows, text_of, write_parquet
from streaming_waits import waits

TEN_GB = 10_000_000_000

# Tokens per second.


def write_text(folder: Path, megabytes: int) -> None:
    """Parquet files of 25 MB, and a tokenizer of 8,000 tokens."""
    from data.pieces import chunks_of
    from data.subwords import train_bpe

    rows = 25_000_000 // ROW_BYTES
    for part in range(megabytes // 25):
        write_parquet(folder / "data" / f"{part}.parquet", list(made_up_rows(rows, seed=part)))
    texts = [{"text": text, "ends": [len(text)]} for text in made_up_rows(2000)]
    train_bpe(8000, chunks_of(texts, sys.maxsize), 2000 * ROW_BYTES).save(folder)


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


# A start in the middle.


def first_batch(folder: Path, step: int, cache: Path) -> dict[str, Any]:
    """Seconds and bytes of the first batch at a step, which is about at this place of the data."""
    from data.reading.access import Access

    text, _ = text_of([folder], cache, window_bytes=32_000_000)
    batch, block = 12, 64
    done = (step - 1) * batch
    windows = len(text.sources[0].windows(0))
    epoch, rest = divmod(done * block, TEN_GB)  # a token is a byte
    window = rest * windows // TEN_GB
    text.begin_at([{"epoch": epoch, "window": window, "row": 0, "token": 0, "blocks": done}])
    read = Counter[str]()
    original = Access.read

    def noted(self: Access, source: str, file: Any, begin: int, end: int) -> Any:
        read["bytes"] += min(end, file.size) - begin
        return original(self, source, file, begin, end)

    Access.read = noted  # type: ignore[method-assign]
    begun = time.perf_counter()
    blocks = text.sequences(block)
    blocks.__getitems__(blocks.order(1, batch).items(done, batch))
    seconds = time.perf_counter() - begun
    return {"step": step, "seconds": seconds, **read, "window": window, "windows": windows}


def start(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The first batch of step 1 and of step 1,000,000 of a data set of 10 GB."""
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_parquet(folder / "one", list(made_up_rows(TEN_GB // 100 // ROW_BYTES)))
        (folder / "data").mkdir()
        for number in range(100):
            (folder / "data" / f"{number:03}.parquet").hardlink_to(folder / "one")
        for turn, step in enumerate((1, 1_000_000) * options.repeats):
            work = [str(folder / "data"), str(step), str(folder / f"cache {turn}")]
            command = [sys.executable, __file__, "first-batch", *work]
            shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found.append(json.loads(shown.splitlines()[-1]))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    rows = []
    for step in (1, 1_000_000):
        several = [one for one in found if one["step"] == step]
        seconds = statistics.median(one["seconds"] for one in several)
        rows.append([f"{step:,}", f"{seconds:.2f}", f"{max(one['bytes'] for one in several):,}"])
    print_table(["step", "first batch, s", "bytes read"], rows)
    return found


def main() -> None:
    if sys.argv[1:2] == ["first-batch"]:  # in a process of its own
        _, _, folder, step, cache = sys.argv
        print(json.dumps(first_batch(Path(folder), int(step), Path(cache))), flush=True)
        os._exit(0)  # a thread prepares the next window
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("resume", "loader", "start", "waits"))
    parser.add_argument("--peers", help="a Python with litdata and mosaicml-streaming")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print(as_words(machine()))
    commands: dict[str, Callable[[argparse.Namespace], Any]] = {
        "resume": lambda options: resume(),
        "loader": loader,
        "start": start,
        "waits": lambda options: waits(options.repeats),
    }
    command = commands[options.command]
    save(f"streaming_{options.command}", command(options))


if __name__ == "__main__":
    main()
