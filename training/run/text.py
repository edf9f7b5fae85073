"""The text of a run: prepared, or streamed at the revisions of the snapshot that it resumes from.

It is the same on all processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from common.command import say_error
from config.schema import Config, DataConfig, is_streamed, other_model
from data.corpus import Corpus, prepare_corpus
from data.errors import DataError
from data.public_names import public_name
from data.reading.access import Access
from data.reading.groups import Listing
from data.streaming.streamed import StreamedText, list_stream, open_stream
from data.tokenizer import CHARACTERS, TOKENIZER_FILES, bpe_size, lacks_file
from data.tokenizer_files import end_ids
from snapshot.disk.state import RunState
from snapshot.named_model import NamedModel, open_tokenizer
from snapshot.start import Start
from training.distributed.launcher import is_one_machine
from training.distributed.processes import (
    decided_by_main,
    equal_on_all,
    local_main_first,
)
from training.run.pretrained import PretrainedModel


def prepare_text(
    accelerator: Accelerator, config: Config, start: Start, pretrained: PretrainedModel | None
) -> Corpus:
    """Prepare the text on each machine once; of a streamed one only held-out rows are read here.

    A stream is read at the revisions of the snapshot that the attempt resumes from, or else at the
    newest, on which the main process decides. Every process must call this. Raises DataError when
    the machines have different texts.
    """
    base = None if pretrained is None else pretrained.base
    data, first = config.data, accelerator.is_local_main_process
    access = Access(Path(data.cache_dir), say_error if first else None, say_error)
    listings: list[Listing] = []

    def list_on_main() -> list[str | None]:
        listings.extend(list_stream(data, access, revisions_of(data, start.state)))
        return [listing.revision for listing in listings]

    revisions = decided_by_main(accelerator, list_on_main) if is_streamed(data) else []
    corpus = local_main_first(
        accelerator,
        lambda: open_text(
            data,
            tokenizer_of_run(config, start, base),
            config.train.seed,
            access,
            listings or (list_stream(data, access, revisions) if revisions else []),
            first,
        ),
    )
    if not (is_one_machine() or equal_on_all(accelerator, corpus.info.fingerprint)):
        other = data.tokenizer != CHARACTERS
        same = f", or data.tokenizer={data.tokenizer} is not the same tokenizer" if other else ""
        raise DataError(
            f"data.source={corpus.info.name} is not the same text{same} on all machines."
        )
    return corpus if base is None else replace(corpus, ends=frozenset(end_ids(base.folder)))


def open_text(
    data: DataConfig,
    tokenizer: str | Path,
    seed: int,
    access: Access,
    listings: Sequence[Listing] = (),
    reads_ahead: bool = True,
) -> Corpus:
    """The text of the keys `data.*`: streamed from its `listings`, or prepared on this disk.

    Of the processes of a machine one `reads_ahead`. Raises DataError.
    """
    if not listings:
        return prepare_corpus(data, tokenizer, access.say)
    with access.at_start():
        return open_stream(data, listings, access, tokenizer, seed, reads_ahead)


def revisions_of(data: DataConfig, state: RunState | None) -> list[str | None]:
    """The commit of each streamed source in the state of a snapshot; None where it names none."""
    names = [public_name(part.source) for part in data.sources]
    stream = [] if state is None else state.stream or []
    if [one["source"] for one in stream] == names:
        return [one["revision"] for one in stream]
    return [None] * len(names)


def tokenizer_of_run(config: Config, start: Start, base: NamedModel | None) -> str | Path:
    """The tokenizer as `prepare_corpus` takes it: char, bpe:<size>, or a folder on this machine.

    `base` is the model that the run begins from. One of a repo is downloaded. Raises DataError for
    what has no tokenizer, SnapshotError and StoreError for what cannot be downloaded.
    """
    name = config.data.tokenizer or CHARACTERS
    if name == CHARACTERS or bpe_size(name) is not None:
        return name
    other = other_model(config.model)
    if base is not None and other is not None and name == other[1]:
        folder = base.folder
    else:
        folder = start.folder or Path(name).expanduser()
        if not folder.exists():
            folder = open_tokenizer(name, config.hub.timeout_seconds)
    if (folder / TOKENIZER_FILES[0]).is_file():
        return folder
    raise DataError(lacks_file(f"data.tokenizer={name}", name))


def begin_stream(corpus: Corpus, config: Config, state: RunState | None) -> None:
    """Have a streamed text continue where the snapshot of a state ends, if there is one.

    Raises DataError for another mix.
    """
    if state is not None and state.stream is not None and isinstance(corpus.train, StreamedText):
        corpus.train.begin_at(state.stream, state.step * config.train.global_batch_size)


def data_facts(corpus: Corpus) -> dict[str, Any]:
    """What a snapshot records of its text."""
    info = corpus.info
    facts: dict[str, Any] = {
        "name": public_name(info.name),
        "fingerprint": info.fingerprint,
        "characters": info.characters,
        "vocabulary": corpus.tokenizer.vocab_size,
        "unit": corpus.tokenizer.unit,
    }
    if not info.is_lossy:  # or bits per byte would be computed from them
        facts |= {"held_out_tokens": info.held_out_targets, "held_out_bytes": info.held_out_bytes}
    return facts if info.lost_in_words is None else facts | {"lost": info.lost_in_words}
