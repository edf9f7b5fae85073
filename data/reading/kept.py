"""Small files that are kept in `data.cache_dir`, so that a later start requests them no more."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from data.once import temporary_name

DIGEST_BYTES = 32


def digest_of(*parts: str) -> str:
    """A name for what these parts identify."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def keep(path: Path, content: bytes) -> None:
    """Write a file and its hash. Without the file it is requested again: errors do not matter."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(path)
        temporary.write_bytes(hashlib.sha256(content).digest() + content)
        temporary.rename(path)


def kept(path: Path) -> bytes | None:
    """What `keep` wrote; None if it is absent or damaged."""
    try:
        found = path.read_bytes()
    except OSError:
        return None
    content = found[DIGEST_BYTES:]
    return content if hashlib.sha256(content).digest() == found[:DIGEST_BYTES] else None
