"""Whether a snapshot belongs to the run that a configuration and its text describe."""

from __future__ import annotations

from typing import Any

from config.schema import Config
from config.stored import as_plain
from data.corpus import Corpus
from data.public_names import public_name
from snapshot.disk.state import RunState
from snapshot.other_run import refuse_other_run
from snapshot.start import StateCheck
from training.run.streams import has_begun_otherwise


def refusal_of_others(config: Config, corpus: Corpus) -> StateCheck:
    """The check of a snapshot's state: it raises SnapshotError for the snapshot of another run.

    It needs nothing but the state, so a snapshot is checked before the rest of it is downloaded.
    The text of a stream is compared only if it has begun as that of the snapshot.
    """
    plain, facts = as_plain(config), data_facts(corpus)

    def refuse(state: RunState) -> None:
        unknown = has_begun_otherwise(config, corpus, state)
        refuse_other_run(state, plain, None if unknown else facts)

    return refuse


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
