"""generation_config.json: where other programs stop a model, and how they sample from it.

A snapshot has that of the model which the run began from. It is untrusted input: what it may hold
are token ids, numbers and switches, and nothing that names code or a file.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from data.tokenizer_files import CONFIG, END_ID, GENERATION, model_settings
from snapshot.disk.files import read_json
from snapshot.errors import SnapshotError

IDS = ("bos_token_id", END_ID, "pad_token_id")
SWITCHES = ("do_sample",)
NUMBERS = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty"),
    *("no_repeat_ngram_size", "max_length", "max_new_tokens"),
)
MOST_ENDS = 1_000


def generation_of(folder: Path | None, stops: Collection[int]) -> dict[str, Any]:
    """The generation_config.json of a run that began from the model in `folder`; empty: none.

    `stops` are tokens that end a reply as well, if the run trains on conversations. Where the model
    has no generation_config.json, the ids in its config.json hold, which such a file would replace.
    """
    content = {} if folder is None else model_settings(folder, GENERATION)
    if stops and folder is not None and not (folder / GENERATION).exists():
        entries = model_settings(folder, CONFIG)
        content = {key: entries[key] for key in IDS if key in entries}
    kept = {key: value for key, value in content.items() if _is_valid(key, value)}
    if stops:
        ends = kept.get(END_ID, [])
        both = [*(ends if isinstance(ends, list) else [ends]), *sorted(stops)]
        kept[END_ID] = list(dict.fromkeys(both))
    return kept


def check_generation(folder: Path) -> None:
    """Raise SnapshotError for a generation_config.json that `generation_of` does not make."""
    path = folder / GENERATION
    if not path.exists():
        return
    content = read_json(path)
    if not isinstance(content, dict):
        raise SnapshotError(f"{path} is not the configuration of generating")
    for key, value in content.items():
        if not _is_valid(key, value):
            raise SnapshotError(f"{path} has an entry {key!r} that no snapshot has")


def _is_valid(key: str, value: Any) -> bool:
    if key in IDS:
        ids = value if isinstance(value, list) and key == END_ID else [value]
        return len(ids) <= MOST_ENDS and all(type(one) is int and 0 <= one < 2**31 for one in ids)
    if key in NUMBERS:
        return type(value) in (int, float) and abs(value) < 2**31 and math.isfinite(value)
    return key in SWITCHES and isinstance(value, bool)
