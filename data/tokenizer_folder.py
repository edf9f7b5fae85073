"""The files of a tokenizer in a folder, as they are read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.special_tokens import end_ids
from data.tokenizer import TOKENIZER_FILES

CHAT_TEMPLATE = "chat_template.jinja"


def has_subwords(folder: Path) -> bool:
    """Whether a folder has a tokenizer of subwords, which has an end-of-text token."""
    return "eos_token" in read_json(folder / TOKENIZER_FILES[1])


def folder_key(folder: Path) -> str:
    """A digest of a tokenizer's folder; it changes whenever its tokenizer may have changed."""
    digest = hashlib.sha256()
    for name in (*TOKENIZER_FILES, CHAT_TEMPLATE):
        if name == TOKENIZER_FILES[0] or (folder / name).exists():
            digest.update(f"{name}\0".encode() + hashlib.sha256(read(folder / name)).digest())
    if not (folder / TOKENIZER_FILES[1]).exists() or not has_subwords(folder):
        digest.update(repr(end_ids(folder)).encode())
    return digest.hexdigest()


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} cannot be read: it is not an object")
    return content
