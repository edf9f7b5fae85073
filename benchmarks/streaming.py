"""A streamed data set: rows after kills, tokens per second, and a start in the middle.

    python benchmarks/streaming.py resume
    python benchmarks/streaming.py loader --peers /path/to/python
    python benchmarks/streaming.py start

`resume` reads two data sets mixed 0.7 and 0.3, is killed twenty times, and counts the rows that a
reader of `datasets` (interleave_datasets, shuffle, state_dict) and ours see twice or never.
`loader` reads the same files with ours, `datasets`, litdata and mosaicml-streaming; --peers names a
Python that has the last two. `start` begins at step 1,000,000 of 10 GB, 100 names of one file.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
from common import ROOT, as_words, machine, print_table, save
from pyarrow import parquet

sys.path.insert(0, str(ROOT))
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"

KILLS, ROWS, BUFFER, EVERY = 20, (14_000, 6_000), 1000, 500
WEIGHTS = [0.7, 0.3]
ROW_BYTES = 2000
TEN_GB = 10_000_000_000
OpenAt = Callable[[Any], tuple[Iterator[str], Callable[[], Any]]]
"""Rows from a state on, None for the beginning, and what gives the present state."""


def made_up_rows(count: int, seed: int = 7, size: int = ROW_BYTES) -> Iterator[str]:
    """Rows of made-up words."""
    chosen = random.Random(seed)
    words = ["".join(chosen.choices("etaoinshrdlu", k=chosen.randrange(2, 9))) for _ in range(5000)]
    for _ in range(count):
        yield " ".join(chosen.choices(words, k=size // 6))


def write_parquet(path: Path, texts: list[str], group: int = 1000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table({"text": texts}), path, row_group_size=group)


# What is read again after a kill, and what is not.


def write_sources(folder: Path) -> list[Path]:
    """Two data sets of four files, whose rows are their own numbers."""
    sources = []
    for name, count in zip("ab", ROWS, strict=True):
        for part in range(4):
            texts = [f"{name}{number}" for number in range(part, count, 4)]
            write_parquet(folder / name / f"{part}.parquet", texts, group=250)
        sources.append(folder / name)
    return sources


def with_kills(open_at: OpenAt, wanted: int, kills: int) -> list[str]:
    """The rows that are trained on, by attempts that end in a kill.

    A state is saved every `EVERY` rows, and what follows it is lost with a kill, and read again.
    Every second attempt is killed before it saves any.
    """
    chosen = random.Random(3)
    attempts = [(chosen.randrange(EVERY, 2 * EVERY), 50) for _ in range(kills // 2)]
    state, kept = None, []
    for rows_of_attempt in [*(rows for pair in attempts for rows in pair), wanted]:
        rows, state_of = open_at(state)
        since: list[str] = []
        for row in islice(rows, rows_of_attempt):
            since.append(row)
            if len(since) == EVERY:
                state = json.loads(json.dumps(state_of()))
                kept, since = kept + since, []
    return (kept + since)[:wanted]


def datasets_at(sources: list[Path], cache: Path, state: Any) -> tuple[Iterator[str], Any]:
    from datasets import config, interleave_datasets, load_dataset

    config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0  # seconds of each reader that is left
    parts = [
        load_dataset(
            "parquet",
            data_files=sorted(str(file) for file in source.iterdir()),
            split="train",
            streaming=True,
            cache_dir=str(cache),
        )
        for source in sources
    ]
    mixed = interleave_datasets(
        parts, probabilities=WEIGHTS, seed=1, stopping_strategy="all_exhausted_without_replacement"
    ).shuffle(seed=1, buffer_size=BUFFER)
    if state is not None:
        mixed.load_state_dict(state)
    return (row["text"] for row in mixed), mixed.state_dict


def text_of(sources: list[Path], cache: Path, **settings: Any) -> tuple[Any, Any]:
    """Our stream of sources, and what reads their bytes."""
    from data.streaming.access import Access
    from data.streaming.corpus import fixed_tokenizer, stream_corpus
    from data.streaming.listing import list_source
    from data.streaming.reading import read_group

    access = Access(cache)
    corpus = stream_corpus(
        [list_source(str(source), "text", access) for source in sources],
        WEIGHTS[: len(sources)],
        partial(read_group, access=access),
        fixed_tokenizer("bpe:257"),
        seed=1,
        val_fraction=0.001,
        prefetch_bytes=0,
        cache_bytes=10**9,
        held_out_bytes=1,
        cache_dir=cache,
        **settings,
    )
    return corpus.train, access


def ours_at(sources: list[Path], cache: Path, state: Any) -> tuple[Iterator[str], Any]:
    """The rows in our blocks, each of one source; a row may begin in one and end in a later one."""
    text, _ = text_of(sources, cache, window_bytes=20_000)
    state = copy.deepcopy(state) or {"step": 0, "cursors": None, "begun": {}}
    if state["cursors"]:
        text.begin_at(state["cursors"])
    tokenizer = text.sources[0].settings.tokenizer
    blocks = text.sequences(16)
    order = blocks.order(1, 1)

    def rows() -> Iterator[str]:
        while True:
            for tokens in state["begun"].values():
                while tokenizer.end_of_text in tokens:
                    end = tokens.index(tokenizer.end_of_text)
                    row = tokenizer.decode(tokens[:end]).strip()
                    del tokens[: end + 1]
                    yield row
            (inputs, _), _ = blocks.__getitems__(order.items(state["step"], 1))
            source = str(text.mix.sources(state["step"], 1)[0])
            state["begun"].setdefault(source, []).extend(inputs[0].tolist())
            state["step"] += 1

    def state_of() -> dict[str, Any]:
        return {**state, "cursors": text.finish(state["step"])}

    return rows(), state_of


def resume(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows that are lost and doubled by kills: the undisturbed reader has them once."""
    found = []
    wanted = sum(ROWS)  # of `datasets`, each once
    with tempfile.TemporaryDirectory() as folder:
        sources = write_sources(Path(folder) / "data")
        for name, open_at in (("datasets", datasets_at), ("ours", ours_at)):
            opened = partial(open_at, sources, Path(folder) / name)
            calm, killed = (with_kills(opened, wanted, kills) for kills in (0, KILLS))
            same = sum(one == other for one, other in zip(calm, killed, strict=False))
            figures = {
                "reader": name,
                "rows": wanted,
                "kills": KILLS,
                "lost": sum((Counter(calm) - Counter(killed)).values()),
                "doubled": sum((Counter(killed) - Counter(calm)).values()),
                "in their place": same,
            }
            found.append(figures)
            print(json.dumps(figures), file=sys.stderr, flush=True)
    print_table(list(found[0]), [list(one.values()) for one in found])
    return found


# Tokens per second.


def write_text(folder: Path, megabytes: int) -> None:
    """Parquet files of 25 MB, and a tokenizer of 8,000 tokens."""
    from data.bpe import train_bpe
    from data.chunks import chunks_of

    rows = 25_000_000 // ROW_BYTES
    for part in range(megabytes // 25):
        write_parquet(folder / "data" / f"{part}.parquet", list(made_up_rows(rows, seed=part)))
    texts = [{"text": text, "ends": [len(text)]} for text in made_up_rows(2000)]
    train_bpe(8000, chunks_of(texts, sys.maxsize), 2000 * ROW_BYTES).save(folder)


def in_new_process(python: str, name: str, folder: Path, workers: int, tokens: int) -> Any:
    # -P: MosaicML's package has the name of this file.
    script = str(Path(__file__).with_name("streaming_loaders.py"))
    result = subprocess.run(
        [python, "-P", script, name, str(folder), str(workers), str(tokens)],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise SystemExit(result.stderr[-2000:])
    return json.loads(result.stdout.splitlines()[-1])


def loader(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each loader cold, with its preparation, and then warm, without and with worker processes."""
    names = ["ours", "datasets", *(["litdata", "mosaicml"] if options.peers else [])]
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_text(folder, options.megabytes)
        for name in names:
            python = sys.executable if name in ("ours", "datasets") else options.peers
            cold = in_new_process(python, name, folder, 0, options.tokens)
            warm = {
                workers: [
                    in_new_process(python, name, folder, workers, options.tokens)
                    for _ in range(options.repeats)
                ]
                for workers in (0, 2)
            }
            speeds = {
                workers: statistics.median(one["tokens"] / one["read"] for one in several)
                for workers, several in warm.items()
            }
            figures = {
                "loader": name,
                "cold, tokens/s": cold["tokens"] / (cold["prepare"] + cold["read"]),
                "warm, tokens/s": speeds[0],
                "warm, 2 workers": speeds[2],
                "first batch, cold, s": cold["prepare"] + cold["first"],
                "first batch, warm, s": statistics.median(
                    one["prepare"] + one["first"] for one in warm[0]
                ),
            }
            found.append(figures)
            print(json.dumps(figures), file=sys.stderr, flush=True)
    print_table(
        list(found[0]),
        [
            [
                one["loader"],
                *(
                    f"{one[key]:,.{1 if key.endswith('s') and 'batch' in key else 0}f}"
                    for key in list(one)[1:]
                ),
            ]
            for one in found
        ],
    )
    return found


# A start in the middle.


def first_batch(folder: Path, step: int, cache: Path) -> dict[str, Any]:
    """Seconds and bytes of the first batch at a step, which is about at this place of the data."""
    from data.streaming.access import Access

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
    parser.add_argument("command", choices=("resume", "loader", "start"))
    parser.add_argument("--peers", help="a Python with litdata and mosaicml-streaming")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print(as_words(machine()))
    command = {"resume": resume, "loader": loader, "start": start}[options.command]
    save(f"streaming_{options.command}", command(options))


if __name__ == "__main__":
    main()
