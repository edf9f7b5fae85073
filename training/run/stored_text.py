"""The text that a run was trained and evaluated on, by the configuration in its snapshot.

A snapshot is untrusted input: its configuration is parsed by the schema, as a command line is.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from config.checks import problems
from config.schema import Config, DataConfig
from config.stored import CONFIG_FILE, read_config
from data.corpus import Corpus
from data.errors import DataError
from data.public_names import public_config
from data.tokenizer import CHARACTERS, bpe_size
from snapshot.disk.state import RunState
from snapshot.errors import SnapshotError
from snapshot.named_model import NamedModel

SECTIONS = ("data", "model", "train")


def stored_config(state: RunState, folder: Path) -> Config:
    """The configuration in the state of a snapshot, as far as it is about text and model.

    Raises SnapshotError for values that no run has.
    """
    stored: dict[str, dict[str, Any]] = {}
    for section in SECTIONS:
        names = {entry.name for entry in fields(getattr(Config(), section))}
        values = state.config.get(section)
        values = values if isinstance(values, dict) else {}
        stored[section] = {name: values[name] for name in names & values.keys()}
    named = {**stored, "run": {"name": "run", "dir": "run"}}
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), named))
        assert isinstance(config, Config)
    except OmegaConfBaseException as error:
        raise _not_valid(folder, str(error).splitlines()[0]) from error
    for section, values in stored.items():
        for name, value in asdict(getattr(config, section)).items():
            if values.get(name, ...) != value:  # it was converted, or interpolated
                raise _not_valid(folder, f"{section}.{name} is of another type")
    for problem in problems(config):
        if problem.startswith(("data.", "train.")):
            raise _not_valid(folder, problem)
    return config


def _not_valid(folder: Path, why: str) -> SnapshotError:
    return SnapshotError(f"{folder} has no valid configuration in its state: {why.rstrip('.')}.")


@dataclass(frozen=True)
class RunText:
    """The text of a run."""

    config: Config
    state: RunState
    folder: Path
    """The snapshot, which has the tokenizer."""

    @property
    def data(self) -> DataConfig:
        """The keys `data.*` of its configuration."""
        return self.config.data

    @property
    def tokenizer(self) -> str | Path:
        """As `prepare_corpus` takes it."""
        chosen = self.data.tokenizer or CHARACTERS
        is_trained = chosen == CHARACTERS or bpe_size(chosen) is not None
        return chosen if is_trained else self.folder

    def check_same(self, corpus: Corpus) -> None:
        """Raise DataError if a prepared text is not the run's."""
        name, fingerprint = self.state.data.get("name"), str(self.state.data.get("fingerprint"))
        if corpus.info.fingerprint != fingerprint:
            raise DataError(
                f"the text is not the run's: {name} ({fingerprint[:8]}) in the snapshot, "
                f"{corpus.info.name} ({corpus.info.fingerprint[:8]}) now. Name the run's own text "
                "with --source and --held-out, or evaluate all of another one with --source alone."
            )


def run_text(named: NamedModel) -> RunText | None:
    """The text of a run; None for any other model. Raises SnapshotError for values of no run."""
    if (state := named.state) is None:
        return None
    if not named.from_store:
        path = named.folder.absolute().parent.parent / CONFIG_FILE
        state = replace(state, config=_with_folders(state.config, path))
    return RunText(stored_config(state, named.folder), state, named.folder)


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
