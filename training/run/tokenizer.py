"""What `data.tokenizer` names: characters, a vocabulary to train, or the folder of a tokenizer."""

from __future__ import annotations

from pathlib import Path

from config.schema import Config
from data.errors import DataError
from data.tokenizer import CHARACTERS, TOKENIZER_FILES, bpe_size


def tokenizer_folder(config: Config) -> str | Path:
    """The tokenizer as `prepare_corpus` takes it: char, bpe:<size>, or a folder on this machine.

    Raises DataError for anything else.
    """
    name = config.data.tokenizer
    if name == CHARACTERS or bpe_size(name) is not None:
        return name
    folder = Path(name).expanduser()
    if (folder / TOKENIZER_FILES[0]).is_file():
        return folder
    raise DataError(
        f"data.tokenizer={name} is neither {CHARACTERS}, nor bpe:<size>, nor a folder with a "
        f"{TOKENIZER_FILES[0]}. Check it."
    )
