"""The text that a run was trained and evaluated on, by the configuration in its snapshot.

A snapshot is untrusted input: its configuration is parsed by the schema, as a command line is.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from config.checks import problems
from config.schema import Config, DataConfig, is_streamed
from config.stored import CONFIG_FILE, read_config
from data.corpus import Corpus
from data.errors import DataError
from data.public_names import public_config
from data.reading.access import Access
from data.streaming.streamed import list_stream
from data.tokenizer import CHARACTERS, bpe_size
from snapshot.errors import SnapshotError
from snapshot.named_model import NamedModel
from training.run.text import open_text

SECTIONS = ("data", "model", "train")


def stored_config(named: NamedModel) -> Config | None:
    """The configuration of a run, as far as it is about text and model; None for any other model.

    Raises SnapshotError for values that no run has.
    """
    if named.state is None:
        return None
    sections = named.state.config
    if not named.place:
        path = named.folder.absolute().parent.parent / CONFIG_FILE
        sections = _with_folders(sections, path)
    stored: dict[str, dict[str, Any]] = {}
    for section in SECTIONS:
        names = {entry.name for entry in fields(getattr(Config(), section))}
        values = sections.get(section)
        values = values if isinstance(values, dict) else {}
        stored[section] = {name: values[name] for name in names & values.keys()}
    complete = {**stored, "run": {"name": "run", "dir": "run"}}
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), complete))
        assert isinstance(config, Config)
    except OmegaConfBaseException as error:
        raise _not_valid(named, str(error).splitlines()[0]) from error
    for section, values in stored.items():
        for name, value in asdict(getattr(config, section)).items():
            if values.get(name, ...) != value:  # it was converted, or interpolated
                raise _not_valid(named, f"{section}.{name} is of another type")
    for problem in problems(config):
        if problem.startswith(("data.", "train.")):
            raise _not_valid(named, problem)
    return config


def _not_valid(named: NamedModel, why: str) -> SnapshotError:
    where = f"{named.folder} has no valid configuration in its state"
    return SnapshotError(f"{where}: {why.rstrip('.')}.")


def open_stored_text(
    named: NamedModel, data: DataConfig, revisions: Sequence[str | None], access: Access
) -> Corpus:
    """The text of a run, by its keys `data.*`. Raises DataError if it is another one by now."""
    assert named.state is not None
    chosen = data.tokenizer or CHARACTERS
    is_trained = chosen == CHARACTERS or bpe_size(chosen) is not None
    tokenizer = chosen if is_trained else named.folder
    listings = list_stream(data, access, revisions) if is_streamed(data) else []
    corpus = open_text(data, tokenizer, named.state.seed, access, listings)
    known, info = named.state.data, corpus.info
    if info.fingerprint != known.get("fingerprint"):
        raise DataError(
            f"the text is not the run's: {known.get('name')} "
            f"({str(known.get('fingerprint'))[:8]}) in the snapshot, "
            f"{info.name} ({info.fingerprint[:8]}) now. Name the run's own text with --source and "
            "--held-out, or evaluate all of another one with --source alone."
        )
    return corpus


def _with_folders(stored: dict[str, Any], path: Path) -> dict[str, Any]:
    """A snapshot's configuration with the folders of its text, which its run's config.yaml has.

    Without them if that file names other sources, or cannot be read.
    """
    with suppress(KeyError, TypeError):
        if (own := read_config(path)) is not None:
            data, public = {**stored["data"]}, public_config(own)["data"]
            for key in ("source", "mix"):
                if data[key] == public[key]:
                    data[key] = own["data"][key]
            return {**stored, "data": data}
    return stored
