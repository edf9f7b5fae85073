"""The streamed text of a run, as its snapshot's state describes it: the same held-out rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from data.corpus import Corpus
from data.reading.access import Access
from data.reading.groups import TRAIN
from data.reading.listing import list_source
from data.reading.rows import read_group
from data.streaming.corpus import fixed_tokenizer, stream_corpus
from snapshot.config_values import value_of
from snapshot.disk.state import RunState
from snapshot.disk.state_parts import HELD_OUT_GROUPS
from snapshot.errors import SnapshotError
from snapshot.run_text import LARGEST, checked_value, held_out_share

LARGEST_BYTES = 10**15
"""Of a window or the held-out rows; a state is untrusted input."""


@dataclass(frozen=True)
class StreamPart:
    """A source of the stream, at the commit that the run trains on."""

    source: str
    weight: float
    column: str
    revision: str | None
    """None for a source that has no commits."""
    held_out_groups: float = 1.0
    """The share of its groups that have held-out rows."""


def parts_of_run(state: RunState, folder: Path) -> list[StreamPart]:
    """The sources of the run that wrote a snapshot to `folder`. Raises SnapshotError."""
    entry = partial(checked_value, state, folder)
    column = entry("data.text_column", str, "text")
    mix: list[Any] = entry("data.mix", list)
    mix = mix or [{"source": entry("data.source", str), "weight": 1.0, "text_column": None}]
    parts = []
    for found, cursor in zip(mix, state.stream or (), strict=False):
        revision, of_groups = cursor["revision"], cursor.get(HELD_OUT_GROUPS, 1.0)
        try:
            weight = float(found["weight"])
            text_column = found["text_column"] or column
            part = StreamPart(found["source"], weight, text_column, revision, of_groups)
        except (KeyError, TypeError, ValueError, OverflowError):
            break
        if isinstance(part.source, str) and isinstance(part.column, str) and 0 < weight <= LARGEST:
            parts.append(part)
    if len(parts) != len(mix):
        raise SnapshotError(f"{folder} has no valid data.mix in its state.")
    return parts


def stream_of_run(
    state: RunState,
    folder: Path,
    parts: list[StreamPart],
    tokenizer: str | Path,
    *,
    cache_dir: Path,
    threads: int,
    say: Callable[[str], None] | None,
) -> Corpus:
    """The text of the run that wrote a snapshot to `folder`, of which held-out rows are read.

    `parts` are its sources, wherever they are now. Raises SnapshotError for values that no run
    writes, DataError if the sources cannot be listed or read.
    """
    entry = partial(checked_value, state, folder, largest=LARGEST_BYTES)
    skip_broken = entry("data.skip_broken", bool)
    split = value_of(state.config, "data.held_out_split")
    access = Access(cache_dir, say)

    def listed(split: str) -> list[Any]:
        return [
            list_source(part.source, part.column, access, part.revision, split, skip_broken)
            for part in parts
        ]

    with access.waiting.at_start():
        return stream_corpus(
            listed(TRAIN),
            [part.weight for part in parts],
            partial(read_group, access=access, skip_broken=skip_broken),
            fixed_tokenizer(tokenizer),
            seed=state.seed,
            val_fraction=held_out_share(state, folder),
            window_bytes=entry("data.window_bytes", int),
            prefetch_bytes=0,
            cache_bytes=LARGEST_BYTES,  # nothing is removed for a few held-out rows
            held_out_bytes=entry("data.held_out_bytes", int),
            cache_dir=cache_dir,
            held_out=[] if split is None else listed(entry("data.held_out_split", str)),
            held_out_groups=[part.held_out_groups for part in parts],
            skip_broken=skip_broken,
            left_out=access.note_left_out,
            threads=threads,
            say=say,
        )
