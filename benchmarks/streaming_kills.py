"""What is read again after a kill, and what is not: by `datasets`, and by ours.

python benchmarks/streaming.py resume
"""

from __future__ import annotations

import copy
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from harness import print_table
from streaming_texts import WEIGHTS, text_of, write_parquet

KILLS, ROWS, BUFFER, EVERY = 20, (14_000, 6_000), 1000, 500
OpenAt = Callable[[Any], tuple[Iterator[str], Callable[[], Any]]]
"""Rows from a state on, None for the beginning, and what gives the present state."""


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


def resume() -> list[dict[str, Any]]:
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
