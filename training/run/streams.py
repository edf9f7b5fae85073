"""The streamed text of a run: listed at one revision, the same on all processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from config.mix import MixPart
from config.schema import Config
from config.streaming import is_streamed
from data.columns import PACKED
from data.corpus import Corpus
from data.errors import DataError
from data.public_names import public_name
from data.reading.access import Access
from data.reading.groups import TRAIN, Listing
from data.reading.listing import list_source
from data.reading.places import check_formats, find_files, is_one_group
from data.reading.rows import read_group
from data.sources import BUILT_IN
from data.streaming.corpus import fixed_tokenizer, stream_corpus
from data.streaming.text import StreamedText
from data.tokenizer import CHARACTERS, OF_BYTES, bpe_size
from model.cpu.cores import cores
from snapshot.base import Base
from snapshot.disk.state import RunState, read_state
from snapshot.disk.state_parts import HELD_OUT_GROUPS
from snapshot.errors import SnapshotError
from snapshot.store import newest_state
from training.distributed.agreement import (
    broadcast_text,
    equal_on_all,
    local_main_first,
    run_on_main,
)
from training.distributed.environment import processes_here
from training.reporting.output import say_error
from training.run.pretrained import newest_begun
from training.run.tokenizer import tokenizer_folder
from training.run.uploading import store_of

LARGE_BYTES = 5_000_000_000
"""Of files: preparing more takes minutes, and two to four times the disk."""
MOST_AT_ONCE_BYTES = 1_000_000_000
"""Of a file that is one group of rows."""
Revisions = list[str | None]
"""The commits of the sources; None for one that has no commits."""


@dataclass(frozen=True)
class Begun:
    """What a run has decided of its sources when it began."""

    revisions: Revisions
    held_out_groups: list[float] | None
    """Of each, the share of its groups that have held-out rows; None in a new run."""


def parts_of(config: Config) -> Sequence[MixPart]:
    """The sources of a streamed text."""
    return config.data.mix or [MixPart(config.data.source)]


def names_of(config: Config) -> list[str]:
    """The sources of a streamed text, as a snapshot names them."""
    return [public_name(part.source) for part in parts_of(config)]


def _names_in(stream: list[dict[str, Any]]) -> list[str]:
    """The sources in a state; those of older snapshots have their folders."""
    return [public_name(one["source"]) for one in stream]


def is_streamed_text(accelerator: Accelerator, config: Config) -> bool:
    """Whether the text is streamed; without `data.streaming`, because it is large.

    Every process must call this; the main process looks. A run stays what it was at its first step.
    """
    name, data = config.data.tokenizer or CHARACTERS, config.data
    fixed = name == OF_BYTES or (name != CHARACTERS and bpe_size(name) is None)
    is_open = data.streaming is None and not data.mix and fixed and data.documents == PACKED
    if not is_open or data.source in BUILT_IN:
        return is_streamed(config)

    def found() -> bool:
        state = begun_state(config)
        return is_large(config) if state is None else state.stream is not None

    large = run_on_main(accelerator, found)
    return bool(broadcast_text(accelerator, "large" if large else ""))


def begun_state(config: Config) -> RunState | None:
    """The state of this run's newest snapshot, on this disk or else in its repo, if it has one."""
    if (folder := newest_begun(config)) is not None:
        with suppress(SnapshotError):
            return read_state(folder)
    store = store_of(config)
    if store is None or config.snapshot.resume == "never":
        return None
    return newest_state(store, can_do_without=folder is not None)


def is_large(config: Config) -> bool:
    """Whether a source can be streamed, and has more bytes than are prepared unasked.

    A large file that is streamed at once is prepared, which reads it row by row.
    """
    access, source = Access(Path(config.data.cache_dir)), config.data.source
    try:
        with access.waiting.at_start():
            _, files = find_files(access, source, None)
            check_formats(source, [file for _, file in files])
            at_once = [file.size for _, file in files if is_one_group(file)]
    except DataError:  # preparing it finds what is wrong
        return False
    is_bounded = max(at_once, default=0) < MOST_AT_ONCE_BYTES
    return is_bounded and sum(file.size for _, file in files) > LARGE_BYTES


def stream_text(
    accelerator: Accelerator, config: Config, base: Base | None, begun: Begun | None = None
) -> Corpus:
    """List the sources of a run, and read their held-out rows, once on each machine.

    Every process must call this. Without `begun`, as this run's newest snapshot has begun, or else
    at the newest revisions; the main process decides. Raises DataError when the machines have
    different data.
    """
    data, first = config.data, accelerator.is_local_main_process
    access = Access(Path(data.cache_dir), say_error if first else None)
    listed = partial(_listed, config, access)

    def look() -> tuple[list[Listing], list[float] | None]:
        before = begun or _begun(config)
        return listed(before.revisions), before.held_out_groups

    found, of_groups = run_on_main(accelerator, look) or ([], None)
    at = json.dumps([[listing.revision for listing in found], of_groups])
    same = Begun(*json.loads(broadcast_text(accelerator, at)))

    def prepare() -> Corpus:
        with access.waiting.at_start():
            return prepared(found or listed(same.revisions))

    def prepared(listings: list[Listing]) -> Corpus:
        # At the commits of what is trained on: the same rows whenever the branch moves.
        split = data.held_out_split
        held_out = [] if split is None else listed(same.revisions, split)
        refuse_shared_files(listings, held_out)
        return stream_corpus(
            listings,
            [part.weight for part in parts_of(config)],
            partial(read_group, access=access, skip_broken=data.skip_broken),
            fixed_tokenizer(tokenizer_folder(config, base)),
            seed=config.train.seed,
            val_fraction=data.val_fraction,
            window_bytes=data.window_bytes,
            prefetch_bytes=data.prefetch_bytes,
            cache_bytes=data.stream_cache_bytes,
            held_out_bytes=data.held_out_bytes,
            cache_dir=Path(data.cache_dir),
            held_out=held_out,
            held_out_groups=same.held_out_groups,
            skip_broken=data.skip_broken,
            left_out=access.note_left_out if accelerator.is_main_process else None,
            threads=cores(),
            turn=(accelerator.local_process_index, processes_here()),
            say=say_error if first else None,
        )

    corpus = local_main_first(accelerator, prepare)
    if not equal_on_all(accelerator, corpus.info.fingerprint):
        raise DataError(
            f"data.source={corpus.info.name} is not the same data on all machines, or "
            f"data.tokenizer={data.tokenizer} is not the same tokenizer."
        )
    return corpus


def _listed(
    config: Config, access: Access, revisions: Revisions, split: str = TRAIN
) -> list[Listing]:
    data = config.data
    return [
        list_source(
            part.source,
            part.text_column or data.text_column,
            access,
            revision,
            split,
            data.skip_broken,
        )
        for part, revision in zip(parts_of(config), revisions, strict=True)
    ]


def refuse_shared_files(listings: list[Listing], held_out: list[Listing]) -> None:
    """Raise DataError if a file is trained on and held out."""
    trained = {file.url for listing in listings for file in listing.files}
    for listing in held_out:
        for file in listing.files:
            if file.url in trained:
                raise DataError(
                    f"data.held_out_split: {file.name} of {listing.name} is in the split that is "
                    "trained on as well. Choose another split, or leave it out."
                )


def text_at(
    accelerator: Accelerator,
    config: Config,
    base: Base | None,
    corpus: Corpus,
    state: RunState | None,
) -> Corpus:
    """The text at the revisions of the snapshot that the run resumes from, also if it has moved.

    Every process must call this. Raises DataError as `stream_text` does.
    """
    if state is None or state.stream is None or not has_begun_otherwise(config, corpus, state):
        return corpus
    return stream_text(accelerator, config, base, _begun_as(state.stream))


def has_begun_otherwise(config: Config, corpus: Corpus, state: RunState) -> bool:
    """Whether a state's stream has the sources of a text, at other revisions or held out otherwise.

    The text must then be read again as the run began, before the two can be compared.
    """
    if state.stream is None or not isinstance(corpus.train, StreamedText):
        return False
    if names_of(config) != _names_in(state.stream):  # another text: refused
        return False
    sources = corpus.train.sources
    revisions = [source.listing.revision for source in sources]
    now = Begun(revisions, [source.held_out_groups for source in sources])
    return now != _begun_as(state.stream)


def begin_stream(corpus: Corpus, config: Config, state: RunState) -> Corpus:
    """The text; a streamed one continues where the snapshot of a state ends.

    Raises DataError for another mix, SnapshotError for a state that no run writes.
    """
    if state.stream is not None and isinstance(corpus.train, StreamedText):
        blocks = sum(one["blocks"] for one in state.stream)
        if blocks != state.step * config.train.global_batch_size:
            raise SnapshotError(
                f"the state of step {state.step} says that {blocks:,} blocks were read, which are "
                f"not {state.step} steps of {config.train.global_batch_size}."
            )
        corpus.train.begin_at(state.stream)
    return corpus


def stream_after(corpus: Corpus, step: int) -> list[dict[str, Any]] | None:
    """Where a streamed text continues after a step; None for a prepared one."""
    return corpus.train.finish(step) if isinstance(corpus.train, StreamedText) else None


def blocks_of(corpus: Corpus, config: Config) -> Callable[[int], dict[str, int]]:
    """By step, how many blocks each source of a mix has had, as figures for metrics.jsonl."""
    train, batch = corpus.train, config.train.global_batch_size
    if not isinstance(train, StreamedText):
        return lambda step: {}
    return lambda step: train.figures(step * batch)


def _begun(config: Config) -> Begun:
    """As this run's newest snapshot has begun, if it has the sources of this run."""
    state = begun_state(config)
    stream = [] if state is None else state.stream or []
    names = names_of(config)
    if _names_in(stream) == names:
        return _begun_as(stream)
    return Begun([None] * len(names), None)


def _begun_as(stream: list[dict[str, Any]]) -> Begun:
    revisions = [one["revision"] for one in stream]
    return Begun(revisions, [one.get(HELD_OUT_GROUPS, 1.0) for one in stream])
