"""The text that a run was trained and evaluated on, as its snapshot's state describes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from data.columns import DOCUMENT_MODES, MASKED, PACKED
from data.corpus import Corpus
from data.errors import DataError
from data.reading.access import Access
from data.reading.groups import TRAIN
from data.reading.listing import list_source
from data.reading.rows import read_group
from data.streaming.streamed import fixed_tokenizer, stream_corpus
from data.streaming.windows import StreamDefinition, StreamReading
from data.tokenizer import CHARACTERS, bpe_size
from snapshot.config_values import value_of
from snapshot.disk.state import RunState
from snapshot.errors import SnapshotError

LARGEST = 10**9
"""Of any number of windows or tokens; a state is untrusted input."""
LARGEST_BYTES = 10**15
"""Of a window or the held-out rows; a state is untrusted input."""


@dataclass(frozen=True)
class RunText:
    """What a run's configuration says about its text and its evaluation."""

    name: str
    """The text's name, for messages."""
    source: str
    text_column: str
    val_fraction: float
    block_size: int
    documents: str
    tokenizer: str | Path
    """As `prepare_corpus` takes it."""
    most_windows: int | None
    """How many windows of held-out text the run evaluates at most; None for all."""
    fingerprint: str
    is_streamed: bool = False
    """Whether it was read while it was trained on, and not prepared."""

    def check_same(self, corpus: Corpus) -> None:
        """Raise DataError if a prepared text is not the run's."""
        if corpus.info.fingerprint != self.fingerprint:
            raise DataError(
                f"the text is not the run's: {self.name} ({self.fingerprint[:8]}) in the snapshot, "
                f"{corpus.info.name} ({corpus.info.fingerprint[:8]}) now. Name the run's own text "
                "with --source and --held-out, or evaluate all of another one with --source alone."
            )


def checked_value(
    state: RunState,
    folder: Path,
    key: str,
    kind: type,
    default: Any = None,
    largest: int = LARGEST,
) -> Any:
    """The value of a key, or the default for null, from a state, which is untrusted input.

    Raises SnapshotError if it is not of that kind, or a number out of 1..`largest`.
    """
    value = value_of(state.config, key)
    value = default if value is None else value
    valid = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
    if not valid or (kind is int and not 1 <= value <= largest):
        raise SnapshotError(f"{folder} has no valid {key} in its state.")
    return value


def held_out_share(state: RunState, folder: Path) -> float:
    """`data.val_fraction`. Raises SnapshotError."""
    val_fraction: float = checked_value(state, folder, "data.val_fraction", float)
    if not 0 < val_fraction <= 0.5:
        raise SnapshotError(f"{folder} has no valid data.val_fraction in its state.")
    return val_fraction


def text_of_run(state: RunState, folder: Path) -> RunText:
    """The text of the run that wrote a snapshot to `folder`. Raises SnapshotError."""
    entry = partial(checked_value, state, folder)
    if (documents := entry("data.documents", str, PACKED)) not in DOCUMENT_MODES:
        raise SnapshotError(f"{folder} has no valid data.documents in its state.")
    chosen = entry("data.tokenizer", str, CHARACTERS)
    trained = chosen == CHARACTERS or bpe_size(chosen) is not None
    windows = None
    if value_of(state.config, "train.eval_batches") is not None:
        windows = entry("train.eval_batches", int) * entry("train.global_batch_size", int)
    return RunText(
        name=str(state.data.get("name")),
        source=entry("data.source", str),
        text_column=entry("data.text_column", str, "text"),
        val_fraction=held_out_share(state, folder),
        block_size=entry("data.block_size", int),
        documents=documents,
        tokenizer=chosen if trained else folder,
        most_windows=windows,
        fingerprint=str(state.data.get("fingerprint")),
        is_streamed=state.stream is not None,
    )


@dataclass(frozen=True)
class StreamPart:
    """A source of the stream, at the commit that the run trains on."""

    source: str
    weight: float
    column: str
    revision: str | None
    """None for a source that has no commits."""


def parts_of_run(state: RunState, folder: Path) -> list[StreamPart]:
    """The sources of the run that wrote a snapshot to `folder`. Raises SnapshotError."""
    entry = partial(checked_value, state, folder)
    column = entry("data.text_column", str, "text")
    mix: list[Any] = entry("data.mix", list)
    mix = mix or [{"source": entry("data.source", str), "weight": 1.0, "text_column": None}]
    parts = []
    for found, cursor in zip(mix, state.stream or (), strict=False):
        try:
            weight = float(found["weight"])
            text_column = found["text_column"] or column
            part = StreamPart(found["source"], weight, text_column, cursor["revision"])
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
        stream = StreamDefinition(
            listed(TRAIN),
            [part.weight for part in parts],
            fixed_tokenizer(tokenizer),
            seed=state.seed,
            val_fraction=held_out_share(state, folder),
            window_bytes=entry("data.window_bytes", int),
            held_out_bytes=entry("data.held_out_bytes", int),
            held_out=[] if split is None else listed(entry("data.held_out_split", str)),
            skip_broken=skip_broken,
            masks=value_of(state.config, "data.documents") == MASKED,
        )
        reading = StreamReading(
            partial(read_group, access=access, skip_broken=skip_broken),
            cache_dir=cache_dir,
            cache_bytes=LARGEST_BYTES,  # nothing is removed for a few held-out rows
            prefetch_bytes=0,
            threads=threads,
            left_out=access.note_left_out,
            say=say,
        )
        return stream_corpus(stream, reading)
