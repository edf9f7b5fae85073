"""What `data.tokenizer` names: characters, a vocabulary to train, or a tokenizer that exists."""

from __future__ import annotations

from pathlib import Path

from config.schema import Config, other_model
from data.errors import DataError
from data.tokenizer import CHARACTERS, TOKENIZER_FILES, bpe_size, lacks_file
from snapshot.base import Base, open_tokenizer
from snapshot.disk.reading import names_in
from training.run.pretrained import newest_begun


def tokenizer_folder(config: Config, base: Base | None) -> str | Path:
    """The tokenizer as `prepare_corpus` takes it: char, bpe:<size>, or a folder on this machine.

    `base` is the model that the run begins from. One of a repo is downloaded. Raises DataError for
    what has no tokenizer, SnapshotError and HubError for what cannot be downloaded.
    """
    name = config.data.tokenizer or CHARACTERS
    if name == CHARACTERS or bpe_size(name) is not None:
        return name
    other = other_model(config.model)
    if base is not None and other is not None and name == other[1]:
        folder = base.folder
    else:
        folder = newest_begun(config) or Path(name).expanduser()
        if not folder.exists():
            folder = open_tokenizer(name, config.hub.timeout_seconds)
    if (folder / TOKENIZER_FILES[0]).is_file():
        return folder
    raise DataError(lacks_file(f"data.tokenizer={name}", name, names_in(folder)))
