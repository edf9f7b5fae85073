"""A text that is read while it is trained on: what a run sees of its streams.

Letters in shapes: B sequences of one batch, T block_size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from data.errors import DataError, TextLost
from data.public_names import public_name
from data.stream import TokenFile, TokensInFile
from data.streaming.cache import TokenCache
from data.streaming.order import Block, Cursor, Part, StreamOrder, Walk
from data.streaming.prefetch import Prefetcher
from data.streaming.shuffle import Mix
from data.streaming.source import StreamSource
from data.streaming.token_file import tokens_in

OPEN_FILES = 4
"""How many files of each source a process keeps open."""


class StreamedText:
    """The sources of a run, mixed. It is read in one order, once: `sequences(...).order(...)`."""

    def __init__(
        self, sources: Sequence[StreamSource], weights: Sequence[float], prefetcher: Prefetcher
    ) -> None:
        self.sources = sources
        self.mix = Mix(weights, sources[0].settings.seed)
        self._prefetcher = prefetcher
        self._start = [Cursor() for _ in sources]
        self._order: StreamOrder | None = None

    def begin_at(self, state: Sequence[dict[str, Any]]) -> None:
        """Continue where the snapshot with this state ends. Raises DataError for other weights."""
        self._start = [Cursor(**{key: one[key] for key in vars(Cursor())}) for one in state]
        blocks = [cursor.blocks for cursor in self._start]
        if blocks != self.mix.counts(sum(blocks)):
            raise DataError(
                f"data.mix: the run has read {blocks} blocks of its sources, which does not match "
                "these weights. Restore the weights, or give the new run another run.name."
            )

    def sequences(self, block_size: int) -> StreamedBlocks:
        """What a loader reads: blocks of so many tokens."""
        return StreamedBlocks(self, block_size)

    def order(self, block_size: int, global_batch_size: int) -> StreamOrder:
        """The order of the blocks, from where the run begins."""
        walks = []
        for source, start in zip(self.sources, self._start, strict=True):
            walks.append(Walk(source, start, self._prefetcher.reached))
            self._prefetcher.begin(source, (start.epoch, start.window))
        self._order = StreamOrder(walks, self.mix, block_size, global_batch_size)
        return self._order

    @property
    def in_words(self) -> list[str]:
        """The sources and their sizes, a line each."""
        shares = self.mix.blocks / self.mix.blocks.sum()
        return [
            f"{source.listing.name}: {len(source.listing.files):,} files, "
            f"{source.text_bytes / 1e6:,.1f} MB of text, {share:.4g} of the blocks"
            for source, share in zip(self.sources, shares, strict=True)
        ]

    def figures(self, sequences: int) -> dict[str, int]:
        """How many of a run's first blocks are from each source, if there are several."""
        if len(self.sources) == 1:
            return {}
        counts = enumerate(self.mix.counts(sequences), start=1)
        return {f"blocks_of_source_{number}": count for number, count in counts}

    def finish(self, step: int) -> list[dict[str, Any]]:
        """What a snapshot after `step` stores, by source: where the next block begins."""
        assert self._order is not None
        cursors = self._order.finish(step)
        return [
            {
                "source": public_name(source.listing.name),
                "revision": source.listing.revision,
                "held_out_groups": source.held_out_groups,
                **vars(cursor),
            }
            for source, cursor in zip(self.sources, cursors, strict=True)
        ]


class StreamedBlocks(Dataset):
    """Blocks, each a list of parts of files in the cache. A process that has none of them open
    opens them by name, so workers of any kind can read them."""

    def __init__(self, text: StreamedText, block_size: int) -> None:
        settings = text.sources[0].settings
        self.block_size = block_size
        self._text: StreamedText | None = text
        self._cache: TokenCache = settings.cache
        self._dtype: np.dtype = settings.tokenizer.dtype
        self._most_open = OPEN_FILES * len(text.sources)
        self._open: OrderedDict[str, TokensInFile] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        """What a worker needs that is not forked: not the text, which has threads."""
        return {**vars(self), "_text": None, "_open": OrderedDict()}

    def order(self, seed: int, global_batch_size: int) -> StreamOrder:
        """The order in which they are trained on; the seed is that of the text."""
        assert self._text is not None
        return self._text.order(self.block_size, global_batch_size)

    def __getitems__(self, blocks: list[Block]) -> tuple[tuple[Tensor, Tensor], float]:
        """Inputs and targets, each int64 (B, T), and their share, which is 1."""
        tokens = np.empty((len(blocks), self.block_size + 1), dtype=self._dtype)
        files = self._read(part for parts in blocks for part in parts)
        for row, parts in zip(tokens, blocks, strict=True):
            place = 0
            for name, first, count in parts:
                begin, content = files[name]
                row[place : place + count] = content[first - begin : first - begin + count]
                place += count
        # One storage, which a worker sends at once.
        both = np.empty((2, len(blocks), self.block_size), dtype=np.int64)
        both[0], both[1] = tokens[:, :-1], tokens[:, 1:]
        inputs, targets = torch.from_numpy(both)
        return (inputs, targets), 1.0

    def _read(self, parts: Iterable[Part]) -> dict[str, tuple[int, NDArray]]:
        """By file, the tokens from the first to the last of its parts, and where they begin.

        The blocks of a batch are consecutive in each source, so that nothing else is read.
        """
        bounds: dict[str, tuple[int, int]] = {}
        for name, first, count in parts:
            begin, end = bounds.get(name, (first, first))
            bounds[name] = min(begin, first), max(end, first + count)
        return {
            name: (begin, self._tokens(name)[begin:end]) for name, (begin, end) in bounds.items()
        }

    def _tokens(self, name: str) -> TokensInFile:
        if name not in self._open:
            self._open[name] = self._opened(self._cache.path(name))
            if len(self._open) > self._most_open:
                self._open.popitem(last=False)
        return self._open[name]

    def _opened(self, path: Path) -> TokensInFile:
        try:
            return tokens_in(TokenFile(path), self._dtype)
        except FileNotFoundError as error:
            raise TextLost(
                f"the file {path} of the stream's cache was removed while it was in use. "
                "The next start prepares it again."
            ) from error
