"""A streamed text as a run takes it: what is trained on, and the held-out rows as tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from data.bpe import train_bpe
from data.corpus import Corpus
from data.errors import DataError, cache_error
from data.prepared import PIECE_TOKENS, CorpusInfo
from data.progress import Progress
from data.reading.groups import Group, GroupText, LeftOut, Listing
from data.round_trip import RoundTrip
from data.stream import TokenStream
from data.streaming.cache import TokenCache
from data.streaming.prefetch import Prefetcher, windows_ahead
from data.streaming.shuffle import held_out_groups as share_of_groups
from data.streaming.source import FORMAT, StreamSettings, StreamSource
from data.streaming.text import StreamedText
from data.streaming.token_file import HeldFile
from data.subwords import SubwordTokenizer, tokenizer_of
from data.tokenizer import OF_BYTES, SMALLEST_BPE, Tokenizer

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


def stream_corpus(
    listings: Sequence[Listing],
    weights: Sequence[float],
    read: Callable[[Listing, Group], GroupText],
    tokenizer: Tokenizer,
    *,
    seed: int,
    val_fraction: float,
    window_bytes: int,
    prefetch_bytes: int,
    cache_bytes: int,
    held_out_bytes: int,
    cache_dir: Path,
    held_out: Sequence[Listing] = (),
    held_out_groups: Sequence[float] | None = None,
    skip_broken: bool = False,
    left_out: Callable[[str, LeftOut], None] | None = None,
    threads: int = 1,
    turn: tuple[int, int] = (0, 1),
    say: Callable[[str], None] | None = None,
) -> Corpus:
    """A mix of listed data sets, of which rows are read while they are trained on.

    `read` reads the rows of a group. With `held_out`, the same number of data sets, the rows of
    these are held out, and not a `val_fraction` of all. The held-out rows of a data set are in a
    share `held_out_groups` of its groups; None for what a new run has. With `skip_broken`, `read`
    leaves out what is broken, and `left_out` is called with the source and what it was. `turn` is
    the number of this process on its machine, and how many there are: they share the work.
    `held_out_bytes` of held-out rows are read here, of each source its share. Raises DataError if
    there are none, if a file is in two sources by different names, or if the cache cannot be used.
    """
    refuse_two_names(listings)
    try:
        cache = TokenCache(cache_dir.expanduser() / CACHE, cache_bytes)
        shared = window_bytes, cache, threads, skip_broken, left_out
        share = 0.0 if held_out else val_fraction
        settings = StreamSettings(tokenizer, seed, share, *shared)
        of_groups = held_out_groups or shares_of_groups(listings, share)
        sources = [
            StreamSource(listing, number, partial(read, listing), settings, of_groups[number])
            for number, listing in enumerate(listings)
        ]
        all_rows = replace(settings, held_out_share=1.0)
        evaluated = [
            StreamSource(listing, number, partial(read, listing), all_rows)
            for number, listing in enumerate(held_out)
        ] or sources
        ahead = windows_ahead(prefetch_bytes, window_bytes, len(sources))
        text = StreamedText(sources, weights, Prefetcher(ahead, *turn))
        held = _hold(evaluated, weights, held_out_bytes, say)
    except OSError as error:
        raise cache_error(cache_dir, error) from error
    tokens = TokenStream([one.tokens for one in held])
    info = _info(text, tokens, held, held_out)
    return Corpus(info, tokenizer, text, tokens)


def refuse_two_names(listings: Sequence[Listing]) -> None:
    """Raise DataError if two sources name a file differently: other rows of it would be held out.

    The ones that the first source holds out would be trained on by the second.
    """
    names: dict[str, str] = {}
    for file in (file for listing in listings for file in listing.files):
        if names.setdefault(file.url, file.name) != file.name:
            raise DataError(
                f"data.mix has {file.name} in two sources, whose files have different folders in "
                "common: rows that one of them holds out would be trained on. Name each file in "
                "one source."
            )


def shares_of_groups(listings: Sequence[Listing], share: float) -> list[float]:
    """Of each data set, which share of its groups has held-out rows, in a new run.

    A file of two sources has the same held-out rows in both: then all groups have some.
    """
    files = [file.url for listing in listings for file in listing.files]
    if share == 0 or len(set(files)) < len(files):
        return [1.0] * len(listings)
    return [share_of_groups(len(listing.groups), share) for listing in listings]


def _hold(
    sources: Sequence[StreamSource],
    weights: Sequence[float],
    enough_bytes: int,
    say: Callable[[str], None] | None,
) -> list[HeldFile]:
    """The held-out rows of each source, its share of so many bytes. Raises DataError, OSError."""
    held = []
    with Progress(say) as progress:
        for source, weight in zip(sources, weights, strict=True):
            progress.doing(f"reading held-out rows of {source.listing.name}")
            share = int(enough_bytes * (weight / sum(weights)))
            held.append(source.hold_held_out(max(1, share)))
            if not len(held[-1]):
                raise DataError(
                    f"data.source={source.listing.name} has no held-out row. Raise "
                    "data.val_fraction, name another data.held_out_split, or use more text."
                )
    return held


def _count(tokens: TokenStream, wanted: int | None) -> int:
    """How often a token occurs."""
    windows = (
        tokens.window(first, min(PIECE_TOKENS, len(tokens) - first))
        for first in range(0, 0 if wanted is None else len(tokens), PIECE_TOKENS)
    )
    return sum(int(np.count_nonzero(window == wanted)) for window in windows)


def _info(
    text: StreamedText,
    tokens: TokenStream,
    held: Sequence[HeldFile],
    held_out: Sequence[Listing],
) -> CorpusInfo:
    listings, settings = [source.listing for source in text.sources], text.sources[0].settings
    of_groups = [source.held_out_groups for source in text.sources]
    facts = (
        FORMAT,
        [listing.fingerprint for listing in listings],
        text.mix.blocks.tolist(),
        settings.tokenizer.identity.hex(),
        settings.held_out_share,
        settings.window_bytes,
        *([of_groups] if min(of_groups) < 1 else []),
        *(listing.fingerprint for listing in held_out),
    )
    train_bytes = sum(source.text_bytes for source in text.sources)
    trip = sum((one.trip for one in held), RoundTrip())
    return CorpusInfo(
        name=listings[0].name if len(listings) == 1 else f"{len(listings)} sources",
        characters=0,  # nobody has counted them, nor documents and tokens
        documents=0,
        tokens=0,
        split=0,
        train_bytes=int(train_bytes * (1 - settings.held_out_share)),
        held_out_bytes=sum(one.text_bytes for one in held),
        held_out_targets=len(tokens),
        left_out=0,
        shortened=0,
        fingerprint=hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
        documents_fingerprint="",
        unknown=_count(tokens, settings.tokenizer.unknown),
        checked=trip.checked,
        lost=trip.lost,
        which=trip.which,
    )
