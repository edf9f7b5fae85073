"""A text that is read while it is trained on, as a run takes it.

Letters in shapes: B sequences of one batch, T block_size.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from data.corpus import Corpus
from data.errors import DataError, TextLost, cache_error
from data.order import Mix
from data.prepared import FORMAT, CorpusInfo
from data.progress import Progress
from data.public_names import public_name
from data.reading.groups import Listing
from data.round_trip import RoundTrip
from data.streaming.cache import HeldFile, TokenCache
from data.streaming.walk import (
    Block,
    Cursor,
    Prefetcher,
    Span,
    StreamOrder,
    Walk,
    windows_ahead,
)
from data.streaming.windows import (
    StreamDefinition,
    StreamReading,
    StreamSource,
    held_out_parts,
)
from data.subwords import SubwordTokenizer, tokenizer_of, train_bpe
from data.token_file import (
    NO_NUMBERS,
    TokenFile,
    TokensInFile,
    TokenStream,
    ends_within,
    positions_of,
)
from data.tokenizer import OF_BYTES, SMALLEST_BPE, Tokenizer

OPEN_FILES = 4
"""How many files of each source a process keeps open."""


class StreamedText:
    """The sources of a run, mixed. It is read in one order, once: `sequences(...).order(...)`."""

    def __init__(
        self, sources: Sequence[StreamSource], weights: Sequence[float], prefetcher: Prefetcher
    ) -> None:
        self.sources = sources
        self.mix = Mix(weights, sources[0].definition.seed)
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

    @property
    def masks(self) -> bool:
        """Whether the blocks say by positions where documents begin."""
        return self.sources[0].definition.masks

    def sequences(self, block_size: int, ignored: int) -> StreamedBlocks:
        """What a loader reads: blocks of so many tokens. `ignored` is the target of padding."""
        return StreamedBlocks(self, block_size, ignored)

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
                **vars(cursor),
            }
            for source, cursor in zip(self.sources, cursors, strict=True)
        ]


class Opened(NamedTuple):
    """A file of the cache."""

    tokens: TokensInFile
    ends: NDArray[np.int64]
    """Where documents end; none where nothing is masked."""


class StreamedBlocks(Dataset):
    """Blocks, each a list of parts of files in the cache, which are opened by name."""

    def __init__(self, text: StreamedText, block_size: int, ignored: int) -> None:
        self.block_size, self._ignored = block_size, ignored
        self._text = text
        self._cache = text.sources[0].cache
        self._dtype = text.sources[0].definition.tokenizer.dtype
        self._most_open = OPEN_FILES * len(text.sources)
        self._masks = text.masks
        self._open: OrderedDict[str, Opened] = OrderedDict()

    def order(self, seed: int, global_batch_size: int) -> StreamOrder:
        """The order in which they are trained on; the seed is that of the text."""
        return self._text.order(self.block_size, global_batch_size)

    def __getitems__(self, blocks: list[Block]) -> tuple[tuple[Tensor, ...], float]:
        """Inputs, targets and of masked text positions, each int64 (B, T), and their share.

        That is the share of the rows that are no padding.
        """
        tokens = np.zeros((len(blocks), self.block_size + 1), dtype=self._dtype)
        files = self._read(part for parts in blocks for part in parts)
        for row, parts in zip(tokens, blocks, strict=True):
            place = 0
            for name, first, count in parts:
                begin, content = files[name]
                row[place : place + count] = content[first - begin : first - begin + count]
                place += count
        batch = np.empty((2 + self._masks, len(blocks), self.block_size), dtype=np.int64)
        batch[0], batch[1] = tokens[:, :-1], tokens[:, 1:]
        padding = [not parts for parts in blocks]
        batch[1, padding] = self._ignored
        if self._masks:
            batch[2] = [self._positions(block) for block in blocks]
        return tuple(torch.from_numpy(batch)), 1 - sum(padding) / len(blocks)

    def _positions(self, block: Block) -> NDArray[np.int64]:
        """The positions of a block (T,): a file begins with a document."""
        firsts, place = [NO_NUMBERS], 0
        for name, first, count in block:
            firsts += [np.array([place] if place else [], dtype=np.int64)]
            firsts += [ends_within(self._opened(name).ends, first, count) + place]
            place += count
        found = np.concatenate(firsts)
        return positions_of(self.block_size, found[found < self.block_size])

    def _read(self, parts: Iterable[Span]) -> dict[str, tuple[int, NDArray]]:
        """By file, the tokens from the first to the last of its parts, and where they begin.

        The blocks of a batch are consecutive in each source, so that nothing else is read.
        """
        bounds: dict[str, tuple[int, int]] = {}
        for name, first, count in parts:
            begin, end = bounds.get(name, (first, first))
            bounds[name] = min(begin, first), max(end, first + count)
        return {
            name: (begin, self._opened(name).tokens[begin:end])
            for name, (begin, end) in bounds.items()
        }

    def _opened(self, name: str) -> Opened:
        if name not in self._open:
            path = self._cache.path(name)
            try:
                file = TokenFile(path)
                (tokens,) = file.lists()
                self._open[name] = Opened(tokens, file.ends() if self._masks else NO_NUMBERS)
            except FileNotFoundError as error:
                raise TextLost(
                    f"the file {path} of the stream's cache was removed while it was in use. "
                    "The next start prepares it again."
                ) from error
            if len(self._open) > self._most_open:
                self._open.popitem(last=False)
        return self._open[name]


CACHE = "stream"
"""The folder in `data.cache_dir`."""


def fixed_tokenizer(chosen: str | Path) -> Tokenizer:
    """A tokenizer that does not depend on the text. Raises DataError for any other."""
    if chosen == OF_BYTES:
        return train_bpe(SMALLEST_BPE, [], 0)
    tokenizer = tokenizer_of(chosen) if isinstance(chosen, Path) else None
    if isinstance(tokenizer, SubwordTokenizer):
        return tokenizer
    raise DataError(
        f"data.tokenizer={chosen} needs the whole text beforehand, which streaming does not "
        f"read. Use {OF_BYTES} (bytes), or a repo or folder with a tokenizer of subwords."
    )


def stream_corpus(stream: StreamDefinition, reading: StreamReading) -> Corpus:
    """A mix of data sets, whose rows are read while they are trained on.

    Held-out rows are read here. Raises DataError if there are none, if a file is in two data sets
    by different names, or if the cache cannot be used.
    """
    refuse_two_names(stream.listings)
    parts = held_out_parts(stream.listings, stream.held_out_share)
    try:
        cache = TokenCache(reading.cache_dir.expanduser() / CACHE, reading.cache_bytes)
        sources = [
            StreamSource(listing, number, stream, reading, cache, parts[number])
            for number, listing in enumerate(stream.listings)
        ]
        evaluated = [
            StreamSource(listing, number, stream, reading, cache, np.ones(len(listing.groups)))
            for number, listing in enumerate(stream.held_out)
        ] or sources
        ahead = windows_ahead(reading.prefetch_bytes, stream.window_bytes, len(sources))
        text = StreamedText(sources, stream.weights, Prefetcher(ahead, *reading.turn))
        held = _hold(evaluated, stream, reading.say)
    except OSError as error:
        raise cache_error(reading.cache_dir, error) from error
    tokens = TokenStream([one.tokens for one in held])
    if stream.masks:
        begins = tokens.bounds[:-1]
        ends = [one.ends + begin for one, begin in zip(held, begins, strict=True)]
        tokens = tokens.masked(np.concatenate(ends))
    return Corpus(_info(text, stream, tokens, held), stream.tokenizer, text, tokens)


def refuse_two_names(listings: Sequence[Listing]) -> None:
    """Raise DataError if two sources name a file differently: other rows of it would be held out.

    The ones that the first source holds out would be trained on by the second.
    """
    names: dict[str, str] = {}
    for file in (file for listing in listings for file in listing.files):
        if (name := names.setdefault(file.content_of, file.name)) != file.name:
            raise DataError(
                f"data.mix has one file in two sources, as {name} and {file.name}: rows that one "
                "of them holds out would be trained on. Name each file in one source."
            )


def _hold(
    sources: Sequence[StreamSource], stream: StreamDefinition, say: Callable[[str], None] | None
) -> list[HeldFile]:
    """The held-out rows of each source, its share of them. Raises DataError, OSError."""
    held = []
    with Progress(say) as progress:
        for source, weight in zip(sources, stream.weights, strict=True):
            progress.doing(f"reading held-out rows of {source.listing.name}")
            share = int(stream.held_out_bytes * (weight / sum(stream.weights)))
            held.append(source.hold_held_out(max(1, share)))
            if not len(held[-1]):
                raise DataError(
                    f"data.source={source.listing.name} has no held-out row. Raise "
                    "data.val_fraction, name another data.held_out_split, or use more text."
                )
    return held


def _info(
    text: StreamedText, stream: StreamDefinition, tokens: TokenStream, held: Sequence[HeldFile]
) -> CorpusInfo:
    facts = (
        FORMAT,
        [listing.fingerprint for listing in stream.listings],
        text.mix.blocks.tolist(),
        stream.tokenizer.identity.hex(),
        stream.held_out_share,
        stream.window_bytes,
        *(listing.fingerprint for listing in stream.held_out),
    )
    train_bytes = sum(source.text_bytes for source in text.sources)
    trip = sum((one.trip for one in held), RoundTrip())
    unknown = stream.tokenizer.unknown
    pieces = () if unknown is None else tokens.pieces()
    listings = stream.listings
    return CorpusInfo(
        name=listings[0].name if len(listings) == 1 else f"{len(listings)} sources",
        train_bytes=int(train_bytes * (1 - stream.held_out_share)),
        held_out_bytes=sum(one.text_bytes for one in held),
        held_out_targets=len(tokens),
        fingerprint=hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
        unknown=sum(int(np.count_nonzero(piece == unknown)) for piece in pieces),
        **vars(trip),
    )
