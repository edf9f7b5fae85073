"""A text made ready for training: vocabulary, tokens on disk, split, fingerprint.

Prepared once and cached. The cache folder of a corpus holds `tokens.arrow`, the tokenizer's files
and `corpus.json`; it is built beside its place and renamed, so that it is whole or absent.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from data.errors import DataError
from data.sources import Source, open_source
from data.stream import TokenStream
from data.tokenizer import CharTokenizer

FORMAT = 1
"""Part of every cache key and fingerprint: raise it when prepared corpora change."""


@dataclass(frozen=True)
class CorpusInfo:
    """What `corpus.json` keeps."""

    name: str
    characters: int
    documents: int
    split: int
    """The first held-out token."""
    fingerprint: str
    """Of the text and its split, in hexadecimal; equal for equal text, however it was stored."""


@dataclass(frozen=True)
class Corpus:
    """A prepared text. `train` and `held_out` are disjoint, and no window reaches across."""

    info: CorpusInfo
    tokenizer: CharTokenizer
    train: TokenStream
    held_out: TokenStream


def prepare_corpus(
    source: str,
    *,
    text_column: str,
    val_fraction: float,
    block_size: int,
    cache_dir: Path,
    threads: int = 1,
) -> Corpus:
    """Load the corpus that `source` names, preparing it first where no cache holds it.

    `threads` look its characters up, at most four of them.

    Raises DataError where the text is missing, unreadable, empty or shorter than a block.
    """
    opened = open_source(source, text_column, cache_dir)
    settings = f"{FORMAT}\0{opened.key}\0{val_fraction!r}"
    folder = cache_dir / hashlib.sha256(settings.encode()).hexdigest()[:16]
    if not folder.exists():
        try:
            _prepare_once(opened, val_fraction, folder, threads)
        except OSError as error:
            raise DataError(
                f"data.cache_dir={cache_dir}: the prepared text cannot be written: {error}. "
                "Free some room (one to four bytes a character) or name another folder."
            ) from error
    return _load(folder, block_size, opened.name)


def _prepare_once(opened: Source, val_fraction: float, folder: Path, threads: int) -> None:
    """Build `folder`, unless another process of any machine that shares it was first."""
    from data.prepare import build  # with `datasets`, which a prepared text does without

    folder.parent.mkdir(parents=True, exist_ok=True)
    building = folder.with_name(f".{folder.name}.tmp")
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if folder.exists():
            return
        shutil.rmtree(building, ignore_errors=True)  # left by a process that was killed
        building.mkdir()
        try:
            build(opened, val_fraction, building, threads)
            building.rename(folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)


def _load(folder: Path, block_size: int, name: str) -> Corpus:
    info = CorpusInfo(**json.loads((folder / "corpus.json").read_text()))
    tokens = TokenStream.from_arrow(folder / "tokens.arrow")
    train, held_out = tokens.part(0, info.split), tokens.part(info.split, len(tokens))
    if len(train) <= block_size:
        raise DataError(
            f"data.source={name} has {len(train):,} characters to train on "
            f"({len(tokens):,} less the held-out ones), but data.block_size={block_size} needs at "
            f"least {block_size + 1:,}. Use more text or a smaller block."
        )
    if len(held_out) < 2:
        raise DataError(
            f"data.source={name} leaves {len(held_out)} of {len(tokens):,} characters held out; "
            "evaluation needs at least 2. Raise data.val_fraction or use more text."
        )
    return Corpus(info, CharTokenizer.load(folder), train, held_out)
