"""Which format and which compression the name of a file tells."""

from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path
from typing import Any

TEXT_SUFFIXES = (".txt", ".text", ".md", ".py")
TABLE_READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
COMPRESSIONS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def suffixes(path: str) -> tuple[str, str]:
    """The ending that tells the format and the one that tells the compression ('' for none)."""
    bare = Path(path)
    compression = bare.suffix if bare.suffix in COMPRESSIONS else ""
    return (Path(bare.stem) if compression else bare).suffix, compression
