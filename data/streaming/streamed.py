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
from data.columns import MASKED
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
from data.streaming.walk import Cursor, Walk
from data.streaming.windows import StreamSource, held_out_parts, texts_as_tokens
from data.subwords import SubwordTokenizer, tokenizer_of, train_bpe
from data.token_file import (
    NO_NUMBERS,
    Span,
    TokenFile,
    TokenStream,
    ends_within,
    write_tokens,
)
from data.tokenizer import OF_BYTES, SMALLEST_BPE, Tokenizer, lost_in

CACHE = "stream"
"""The folder in `data.cache_dir`."""


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
        for part, revision in zip(data.sources, revisions, strict=True)
    ]


def open_stream(
    data: Any,
    listings: Sequence[Listing],
    access: Access,
    tokenizer: str | Path,
    seed: int,
    reads_ahead: bool = False,
) -> Corpus:
    """A mix of data sets, by the keys `data.*`, whose rows are read while they are trained on.

    Held-out rows are read here. Those of `data.held_out_split` are read at the commits of what is
    trained on, so they are the same whenever the branch moves. A process that `reads_ahead` does so
    for its machine. Raises DataError if there are no held-out rows, or if the cache cannot be used.
    """
    held_out: list[Listing] = []
    if data.held_out_split is not None:
        revisions = [listing.revision for listing in listings]
        held_out = list_stream(data, access, revisions, data.held_out_split)
    chosen, share = fixed_tokenizer(tokenizer), 0.0 if held_out else data.val_fraction
    parts = held_out_parts(listings, share, held_out)
    try:
        folder = access.cache_dir.expanduser() / CACHE
        source_of = partial(
            StreamSource,
            data=data,
            tokenizer=chosen,
            seed=seed,
            read=partial(read_group, access=access, skip_broken=data.skip_broken),
            cache=TokenCache(folder, data.stream_cache_bytes),
        )
        sources = [source_of(*one) for one in zip(listings, range(len(parts)), parts, strict=True)]
        evaluated = [
            source_of(listing, number, np.ones(len(listing.groups)))
            for number, listing in enumerate(held_out)
        ]
        file = _open_held_out(evaluated or sources, data, access.say)
    except OSError as error:
        raise cache_error(access.cache_dir, error) from error
    text = StreamedText(sources, data, seed, reads_ahead)
    tokens = TokenStream(file, ends=file.ends if text.masks else None)
    facts = (
        FORMAT,
        [listing.fingerprint for listing in listings],
        text.mix.blocks.tolist(),
        chosen.identity.hex(),
        share,
        data.window_bytes,
        *(listing.fingerprint for listing in held_out),
    )
    info = CorpusInfo(
        name=listings[0].name if len(listings) == 1 else f"{len(listings)} sources",
        train_bytes=int(sum(group.bytes for one in listings for group in one.groups) * (1 - share)),
        held_out_targets=len(file),
        fingerprint=hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
        **file.facts,
    )
    return Corpus(info, chosen, text, tokens)


def fixed_tokenizer(chosen: str | Path) -> Tokenizer:
    """A tokenizer that does not depend on the text. Raises DataError for any other."""
    tokenizer = train_bpe(SMALLEST_BPE, [], 0) if chosen == OF_BYTES else tokenizer_of(Path(chosen))
    if isinstance(tokenizer, SubwordTokenizer):
        return tokenizer
    raise DataError(
        f"data.tokenizer={chosen} needs the whole text beforehand, which streaming does not "
        f"read. Use {OF_BYTES} (bytes), or a repo or folder with a tokenizer of subwords."
    )


def _open_held_out(
    sources: Sequence[StreamSource], data: Any, say: Callable[[str], None]
) -> TokenFile:
    """The held-out rows of each source, its share of them. Raises DataError, OSError."""
    weights = [part.weight for part in data.sources]
    shares = [max(1, int(data.held_out_bytes * (weight / sum(weights)))) for weight in weights]
    tokenizer = sources[0].tokenizer

    def write(path: Path) -> None:
        texts: list[str] = []
        with Progress(say) as progress:
            for source, share in zip(sources, shares, strict=True):
                name, before = source.listing.name, len(texts)
                progress.doing(f"reading held-out rows of {name}")
                texts += source.held_out_texts(share)
                if len(texts) == before:
                    raise DataError(
                        f"data.source={name}: none of its held-out rows has a text in "
                        f"data.text_column={source.listing.column.name}. Name the column of the "
                        "texts, another data.held_out_split, or raise data.val_fraction."
                    )
        rows = texts_as_tokens(texts, tokenizer)
        lost, which = lost_in(texts, tokenizer)
        size = sum(map(utf8_bytes, texts))
        facts = {"held_out_bytes": size, "lost": lost, "which": which}
        write_tokens(path, rows, tokenizer.dtype, facts)

    keys = [source.key(share) for source, share in zip(sources, shares, strict=True)]
    name = hashlib.sha256(repr(keys).encode()).hexdigest()[:16]
    return sources[0].cache.open(f"{name}-evaluated", write)


class StreamedText:
    """The sources of a run, mixed. It is read in one order, once, which is itself.

    The loader asks for blocks some steps ahead, so the cursors after these steps are remembered.
    """

    def __init__(
        self, sources: Sequence[StreamSource], data: Any, seed: int, reads_ahead: bool
    ) -> None:
        self.sources = sources
        self.mix = Mix([part.weight for part in data.sources], seed)
        self.masks = data.documents == MASKED
        """Whether blocks say where documents begin."""
        self._reads_ahead = reads_ahead
        self._start, self._next = [Cursor() for _ in sources], 0
        self._after: dict[int, list[Cursor]] = {}

    def begin_at(self, state: Sequence[dict[str, Any]], blocks: int) -> None:
        """Continue where the snapshot with this state ends, after so many blocks.

        Raises DataError for other weights.
        """
        start = [Cursor(**{key: one[key] for key in vars(Cursor())}) for one in state]
        counts = [cursor.blocks for cursor in start]
        if counts != self.mix.counts(blocks):
            raise DataError(
                f"data.mix: the run has read {counts} blocks of its sources, which does not match "
                "these weights. Restore the weights, or give the new run another run.name."
            )
        self._start, self._next = start, blocks

    def order(self, block_size: int, seed: int, global_batch_size: int) -> StreamedText:
        """The order of the blocks, from where the run begins; the seed is that of the text.

        Opens the first window of each source. Raises DataError as reading does.
        """
        pairs = zip(self.sources, self._start, strict=True)
        self._walks = [Walk(source, start) for source, start in pairs]
        for walk in self._walks if self._reads_ahead else ():  # the first windows must not wait
            walk.read_ahead()
        self._block_size, self._global_batch_size = block_size, global_batch_size
        return self

    def items(self, first: int, count: int) -> list[list[Span]]:
        """The items of a loader for the next blocks of the run, in whole steps.

        Raises DataError as reading does.
        """
        assert first == self._next, "blocks are taken one after another"
        blocks: list[list[Span]] = []
        for sources in self.mix.sources(first, count).reshape(-1, self._global_batch_size):
            blocks += [self._walks[source].block(self._block_size) for source in sources]
            self._next += len(sources)
            step = self._next // self._global_batch_size
            self._after[step] = [walk.cursor for walk in self._walks]
        return blocks

    def epoch_of(self, sequence: int) -> int:
        """The lowest epoch of all sources after the step that ends with this sequence."""
        cursors = self._after[(sequence + 1) // self._global_batch_size]
        return min(cursor.epoch for cursor in cursors)

    def block(self, spans: list[Span], most: int) -> tuple[NDArray, NDArray[np.int64]]:
        """The tokens of a block, and where documents begin, if they are masked."""
        tokens = np.concatenate([file[first : first + count] for file, first, count in spans])
        begins, place = [NO_NUMBERS], 0
        for file, first, count in spans if self.masks else ():
            begins += [np.array([place]), ends_within(file.ends, first, count) + place]
            place += count
        return tokens, np.concatenate(begins)

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
