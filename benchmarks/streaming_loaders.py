"""A loader of benchmarks/streaming.py, in a process of its own, whose Python has its package.

    python benchmarks/streaming_loaders.py datasets FOLDER TOKENS

Reads FOLDER/data/*.parquet, encodes with FOLDER/tokenizer.json, and yields batches of 16 blocks of
1,024 tokens and one. Prints seconds and tokens as JSON; `prepare` is the time of a preparation,
`steady` the tokens/s of the median stretch. With 0 TOKENS, ours fills its cache with the epochs
that later passes need.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

BATCH, BLOCK = 16, 1025
SHUFFLED_ROWS = 16_000
"""As many as a window of ours has, of 2 KB each."""
STRETCH = 64
"""Batches of which the median speed is also given: a pause of the machine counts in one stretch."""
EPOCHS = 4
"""What ours keeps of the text for later passes, which read ahead."""


def encoder(folder: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def blocks_of(tokens: Iterable[list[int]], end: int) -> Iterator[np.ndarray]:
    """Rows, each with an end of text, cut into blocks."""
    rest: list[int] = []
    for row in tokens:
        rest += [*row, end]
        while len(rest) >= BLOCK:
            yield np.array(rest[:BLOCK], dtype=np.int64)
            del rest[:BLOCK]


def our_stream(folder: Path) -> Any:
    """The streamed text of a run, with its defaults."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from config.schema import DataConfig
    from data.reading.access import Access
    from data.streaming.streamed import list_stream, open_stream

    access = Access(folder / "ours")
    data = DataConfig(source=str(folder / "data"), val_fraction=0.01, held_out_bytes=100_000)
    listings = list_stream(data, access, [None])
    return open_stream(data, listings, access, folder, seed=1, reads_ahead=True).train


def fill(folder: Path) -> None:
    """Encode the windows of the first epochs, as a run that has had them did."""
    (source,) = our_stream(folder).sources
    for epoch in range(EPOCHS):
        for window in range(len(source.windows(epoch))):
            source.open((epoch, window))


def ours(folder: Path) -> Any:
    """The batches of a run."""
    text = our_stream(folder)
    from data.loader import StepBatches, Windows, window_loader
    from data.split import Split

    blocks = Windows(text, BLOCK - 1, -100)
    order = blocks.order(1, BATCH)
    return window_loader(blocks, StepBatches(order, Split(BATCH), first_step=1))


def datasets(folder: Path) -> Any:
    """`datasets` streaming, with a shuffle buffer."""
    import torch
    from datasets import load_dataset

    tokenizer = encoder(folder)
    end = tokenizer.token_to_id("<|endoftext|>")
    files = sorted(str(path) for path in (folder / "data").iterdir())
    rows = load_dataset(
        "parquet", data_files=files, split="train", streaming=True, cache_dir=str(folder / "hf")
    ).shuffle(seed=1, buffer_size=SHUFFLED_ROWS)

    class Blocks(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[np.ndarray]:
            encoded = (
                one.ids
                for batch in rows.select_columns(["text"]).iter(256)
                for one in tokenizer.encode_batch_fast(batch["text"])
            )
            return blocks_of(encoded, end)

    return torch.utils.data.DataLoader(Blocks(), BATCH, drop_last=True)


def tokens_of(path: str, folder: str) -> Iterator[Any]:
    """What the others prepare: the tokens of a file's rows."""
    import torch
    from pyarrow import parquet

    tokenizer = encoder(Path(folder))
    end = tokenizer.token_to_id("<|endoftext|>")
    for batch in parquet.ParquetFile(path).iter_batches(256, columns=["text"]):
        for one in tokenizer.encode_batch_fast(batch.column(0).to_pylist()):
            yield torch.tensor([*one.ids, end], dtype=torch.int32)


def litdata(folder: Path) -> Any:
    """litdata's chunks of tokens, prepared before."""
    from functools import partial

    lit = importlib.import_module("litdata")
    loader = importlib.import_module("litdata.streaming.item_loader").TokensLoader
    target = folder / "litdata"
    if not target.exists():
        lit.optimize(
            fn=partial(tokens_of, folder=str(folder)),
            inputs=sorted(str(path) for path in (folder / "data").iterdir()),
            output_dir=str(target),
            chunk_bytes="32MB",
            item_loader=loader(BLOCK),
            num_workers=len(os.sched_getaffinity(0)),
        )
    rows = lit.StreamingDataset(
        str(target), item_loader=loader(BLOCK), shuffle=True, seed=1, drop_last=True
    )
    return lit.StreamingDataLoader(rows, batch_size=BATCH)


def mosaicml(folder: Path) -> Any:
    """MosaicML's shards of blocks, prepared before."""
    import torch

    streaming = importlib.import_module("streaming")
    target = folder / "mosaicml"
    if not target.exists():
        columns = {"tokens": f"ndarray:int32:{BLOCK}"}
        files = sorted((folder / "data").iterdir())
        end = encoder(folder).token_to_id("<|endoftext|>")
        rows = (row.tolist()[:-1] for path in files for row in tokens_of(str(path), str(folder)))
        with streaming.MDSWriter(out=str(target), columns=columns) as writer:
            for block in blocks_of(rows, end):
                writer.write({"tokens": block.astype(np.int32)})
    data = streaming.StreamingDataset(
        local=str(target), shuffle=True, shuffle_seed=1, batch_size=BATCH
    )
    return torch.utils.data.DataLoader(data, BATCH, drop_last=True)


def main() -> None:
    name, folder, wanted = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    import torch  # noqa: F401 - not measured

    make = {"ours": ours, "datasets": datasets, "litdata": litdata, "mosaicml": mosaicml}[name]
    if wanted == "0":
        fill(folder)
        print("{}", flush=True)
        return
    begun = time.perf_counter()
    loader = make(folder)
    made = time.perf_counter()
    tokens, first, times = 0, 0.0, []
    for batch in loader:
        times.append(time.perf_counter())
        first = first or times[0] - made
        part = batch["tokens"] if isinstance(batch, dict) else batch
        part = part[0][0] if isinstance(part, list | tuple) else part
        tokens += part.shape[0] * (BLOCK - 1)
        if tokens >= int(wanted):
            break
    ended = time.perf_counter()
    found = {"prepare": made - begun, "first": first, "read": ended - made, "tokens": tokens}
    marks = times[::STRETCH]
    stretches = [after - before for before, after in itertools.pairwise(marks)]
    if stretches:
        found["steady"] = STRETCH * BATCH * (BLOCK - 1) / statistics.median(stretches)
    print(json.dumps(found), flush=True)
    os._exit(0)  # worker processes of some loaders do not end by themselves


if __name__ == "__main__":
    main()
