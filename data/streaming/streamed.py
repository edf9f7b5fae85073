"""A text that is read while it is trained on, as a run takes it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.chunks import utf8_bytes
from data.corpus import Corpus
from data.errors import DataError, cache_error
from data.order import Mix
from data.prepared import FORMAT, CorpusInfo
from data.progress import Progress
from data.public_names import public_name
from data.reading.access import Access
from data.reading.groups import TRAIN, Listing
from data.reading.rows import list_source, read_group
from data.streaming.cache import TokenCache
from data.streaming.walk import Block, Cursor, ReadAhead, Walk
from data.streaming.windows import (
    Stream,
    StreamSource,
    held_out_parts,
    parts_of,
    texts_as_tokens,
)
from data.subwords import SubwordTokenizer, tokenizer_of, train_bpe
from data.token_file import NO_NUMBERS, TokenFile, TokenStream, ends_within, write_tokens
from data.tokenizer import OF_BYTES, SMALLEST_BPE, Tokenizer, lost_in

CACHE = "stream"
"""The folder in `data.cache_dir`."""
MOST_AHEAD = 64
"""Windows of each source: of a short text these are epochs, each with an order of its own."""


def list_stream(
    data: Any, access: Access, revisions: Sequence[str | None], split: str = TRAIN
) -> list[Listing]:
    """The rows of each source, at its revision. Raises DataError."""
    return [
        list_source(
            part.source,
            part.text_column or data.text_column,
            access,
            revision,
            split,
            data.skip_broken,
        )
        for part, revision in zip(parts_of(data), revisions, strict=True)
    ]


def open_stream(
    data: Any,
    listings: Sequence[Listing],
    access: Access,
    tokenizer: str | Path,
    seed: int,
    reads_ahead: bool = False,
    say: Callable[[str], None] | None = None,
) -> Corpus:
    """The stream of the keys `data.*`, see `stream_corpus`; `say` receives progress lines.

    Rows of `data.held_out_split` are read at the commits of what is trained on, so they are the
    same whenever the branch moves. Raises DataError.
    """
    held_out: list[Listing] = []
    if data.held_out_split is not None:
        revisions = [listing.revision for listing in listings]
        held_out = list_stream(data, access, revisions, data.held_out_split)
    trained = {file.url for listing in listings for file in listing.files}
    for listing, file in ((one, file) for one in held_out for file in one.files):
        if file.url in trained:
            raise DataError(
                f"data.held_out_split: {file.name} of {listing.name} is in the split that is "
                "trained on as well. Choose another split, or leave it out."
            )
    ahead = data.prefetch_bytes // (data.window_bytes * len(listings))
    return stream_corpus(
        Stream(
            data=data,
            listings=listings,
            held_out=held_out,
            tokenizer=fixed_tokenizer(tokenizer),
            seed=seed,
            read=partial(read_group, access=access, skip_broken=data.skip_broken),
            cache_dir=access.cache_dir,
            windows_ahead=min(MOST_AHEAD, max(1, ahead)) if reads_ahead else 0,
            say=say,
        )
    )


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


class StreamedText:
    """The sources of a run, mixed. It is read in one order, once, which is itself.

    The loader asks for blocks some steps ahead, so the cursors after these steps are remembered.
    """

    def __init__(self, sources: Sequence[StreamSource], stream: Stream) -> None:
        self.sources = sources
        self.mix = Mix(stream.weights, stream.seed)
        self.masks = stream.masks
        """Whether blocks say where documents begin."""
        self._ahead = ReadAhead(stream.windows_ahead)
        self._start = [Cursor() for _ in sources]

    def begin_at(self, state: Sequence[dict[str, Any]]) -> None:
        """Continue where the snapshot with this state ends. Raises DataError for other weights."""
        self._start = [Cursor(**{key: one[key] for key in vars(Cursor())}) for one in state]
        blocks = [cursor.blocks for cursor in self._start]
        if blocks != self.mix.counts(sum(blocks)):
            raise DataError(
                f"data.mix: the run has read {blocks} blocks of its sources, which does not match "
                "these weights. Restore the weights, or give the new run another run.name."
            )

    def order(self, block_size: int, seed: int, global_batch_size: int) -> StreamedText:
        """The order of the blocks, from where the run begins; the seed is that of the text."""
        pairs = list(zip(self.sources, self._start, strict=True))
        for source, start in reversed(pairs):  # the first one is read by whoever takes a block
            self._ahead.ask(source, (start.epoch, start.window))
        self._walks = [Walk(source, start, self._ahead) for source, start in pairs]
        self._after: dict[int, list[Cursor]] = {}
        self._next = sum(start.blocks for start in self._start)
        self._block_size, self._global_batch_size = block_size, global_batch_size
        return self

    def items(self, first: int, count: int) -> list[Block]:
        """The items of a loader for the next blocks of the run, in whole steps.

        Raises DataError as reading does.
        """
        assert first == self._next, "blocks are taken one after another"
        blocks: list[Block] = []
        for sources in self.mix.sources(first, count).reshape(-1, self._global_batch_size):
            counts = np.bincount(sources, minlength=len(self._walks)).tolist()
            of_sources = [
                iter(walk.take(wanted, self._block_size))
                for walk, wanted in zip(self._walks, counts, strict=True)
            ]
            blocks += [next(of_sources[source]) for source in sources.tolist()]
            self._next += len(sources)
            step = self._next // self._global_batch_size
            self._after[step] = [walk.cursor for walk in self._walks]
        return blocks

    def epoch_of(self, sequence: int) -> int:
        """The lowest epoch of all sources after the step that ends with this sequence."""
        cursors = self._after[(sequence + 1) // self._global_batch_size]
        return min(cursor.epoch for cursor in cursors)

    def block(self, spans: Block, most: int) -> tuple[NDArray, NDArray[np.int64]]:
        """The tokens of a block, and where documents begin, if they are masked."""
        tokens = np.concatenate([file[first : first + count] for file, first, count in spans])
        begins, place = [NO_NUMBERS], 0
        for file, first, count in spans if self.masks else ():
            begins.append(np.array([place] if place else [], dtype=np.int64))  # a file's beginning
            begins.append(ends_within(file.ends, first, count) + place)
            place += count
        return tokens, np.concatenate(begins)

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
        return [
            {
                "source": public_name(source.listing.name),
                "revision": source.listing.revision,
                **vars(cursor),
            }
            for source, cursor in zip(self.sources, self._after.pop(step), strict=True)
        ]


def stream_corpus(stream: Stream) -> Corpus:
    """A mix of data sets, whose rows are read while they are trained on.

    Held-out rows are read here. Raises DataError if there are none, if a file is in two data sets
    by different names, or if the cache cannot be used.
    """
    refuse_two_names(stream.listings)
    parts = held_out_parts(stream.listings, stream.held_out_share)
    try:
        cache = TokenCache(stream.cache_dir.expanduser() / CACHE, stream.data.stream_cache_bytes)
        sources = [
            StreamSource(listing, number, stream, cache, parts[number])
            for number, listing in enumerate(stream.listings)
        ]
        evaluated = [
            StreamSource(listing, number, stream, cache, np.ones(len(listing.groups)))
            for number, listing in enumerate(stream.held_out)
        ] or sources
        file = _open_held_out(evaluated, stream, cache)
    except OSError as error:
        raise cache_error(stream.cache_dir, error) from error
    text = StreamedText(sources, stream)
    held_out = TokenStream(file, ends=file.ends if stream.masks else None)
    return Corpus(_info(text, stream, file), stream.tokenizer, text, held_out)


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


def _open_held_out(sources: Sequence[StreamSource], stream: Stream, cache: TokenCache) -> TokenFile:
    """The held-out rows of each source, its share of them. Raises DataError, OSError."""
    total = sum(stream.weights)
    shares = [max(1, int(stream.data.held_out_bytes * (one / total))) for one in stream.weights]
    pairs = list(zip(sources, shares, strict=True))

    def write(path: Path) -> None:
        texts: list[str] = []
        with Progress(stream.say) as progress:
            for source, share in pairs:
                progress.doing(f"reading held-out rows of {source.listing.name}")
                texts += (of_source := source.held_out_texts(share))
                if not of_source:
                    raise DataError(
                        f"data.source={source.listing.name} has no held-out row. Raise "
                        "data.val_fraction, name another data.held_out_split, or use more text."
                    )
        tokenizer = stream.tokenizer
        rows = list(texts_as_tokens(texts, tokenizer))
        facts = {
            "text_bytes": sum(map(utf8_bytes, texts)),
            "lost": lost_in(texts, tokenizer),
            "unknown": sum(int((part.tokens == tokenizer.unknown).sum()) for part in rows),
        }
        write_tokens(path, rows, tokenizer.dtype, **facts)

    key = json.dumps([(source.held_out_key, share) for source, share in pairs]).encode()
    return cache.open(f"{hashlib.sha256(key).hexdigest()[:16]}-held-out", write)


def _info(text: StreamedText, stream: Stream, held_out: TokenFile) -> CorpusInfo:
    facts = (
        FORMAT,
        [listing.fingerprint for listing in stream.listings],
        text.mix.blocks.tolist(),
        stream.tokenizer.identity.hex(),
        stream.held_out_share,
        stream.data.window_bytes,
        *(listing.fingerprint for listing in stream.held_out),
    )
    train_bytes = sum(source.text_bytes for source in text.sources)
    lost, which = held_out.facts["lost"]
    listings = stream.listings
    return CorpusInfo(
        name=listings[0].name if len(listings) == 1 else f"{len(listings)} sources",
        train_bytes=int(train_bytes * (1 - stream.held_out_share)),
        held_out_bytes=held_out.facts["text_bytes"],
        held_out_targets=len(held_out),
        fingerprint=hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
        unknown=held_out.facts["unknown"],
        lost=lost,
        which=which,
    )
