"""A text made ready for training: vocabulary, tokens on disk, split, fingerprint.

Prepared once and cached. The cache folder of a corpus holds `tokens.arrow`, the tokenizer's files
and `corpus.json`; it is built beside its place and renamed, so that it is whole or absent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from data.errors import BrokenText, DataError, cache_error
from data.once import make_once, remove_abandoned
from data.prepared import FORMAT, CorpusInfo, Damaged, Prepared, load_prepared
from data.progress import Progress
from data.sources import Source, open_source
from data.stream import TokenStream
from data.tokenizer import CharTokenizer


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
    verify: bool = True,
    say: Callable[[str], None] | None = None,
) -> Corpus:
    """Load the corpus that `source` names, preparing it first where no cache holds it whole.

    `threads` look its characters up, at most four of them. `verify` reads all of what the cache
    holds, about a second a GB; one process of each machine does it. `say` is given lines on what
    takes longer than a second, from a thread.

    Raises DataError where the text is missing, unreadable, empty or shorter than a block, and where
    the cache cannot be used.
    """
    cache_dir = _expanded(cache_dir)
    with Progress(say) as progress:
        opened = open_source(source, text_column, cache_dir, progress)
        settings = f"{FORMAT}\0{opened.key}\0{val_fraction!r}"
        folder = cache_dir / hashlib.sha256(settings.encode()).hexdigest()[:16]
        try:
            progress.doing(f"loading {opened.name} as it was prepared")
            if verify:
                remove_abandoned(folder, alone=False)
            prepared = _whole(folder, verify, progress, progress.say)
            if prepared is None:
                prepared = _prepare(opened, val_fraction, folder, threads, progress)
        except BrokenText as error:
            raise opened.refused(error) from error
        except OSError as error:
            raise cache_error(cache_dir, error) from error
        except Damaged as error:
            raise DataError(
                f"data.cache_dir={cache_dir}: what was just prepared is not what {folder} holds: "
                f"{error}. Start again, or name another folder."
            ) from error
    return _parts(prepared, block_size, opened)


def _expanded(cache_dir: Path) -> Path:
    try:
        return cache_dir.expanduser()
    except RuntimeError as error:
        raise DataError(f"data.cache_dir={cache_dir}: {error} Name the folder in full.") from error


def _whole(
    folder: Path, verify: bool, progress: Progress, say: Callable[[str], None]
) -> Prepared | None:
    """The prepared text of a folder; None, and a word of it, where it is absent or damaged."""
    if not folder.exists():
        return None
    try:
        return load_prepared(folder, verify, progress)
    except Damaged as error:
        say(f"warning: the prepared text in {folder} is damaged: {error}. It is prepared anew.")
        return None


def _prepare(
    opened: Source, val_fraction: float, folder: Path, threads: int, progress: Progress
) -> Prepared:
    progress.doing(f"preparing {opened.name}")
    from data.prepare import build  # with `datasets`, which a prepared text does without

    progress.doing(f"waiting for another process that prepares {opened.name}")
    make_once(
        folder,
        lambda building: build(opened, val_fraction, building, threads, progress),
        lambda: _whole(folder, True, progress, lambda line: None) is not None,
    )
    return load_prepared(folder, False, progress)


def _parts(prepared: Prepared, block_size: int, opened: Source) -> Corpus:
    # Another file of the same text may have been prepared first: the name is today's.
    info, tokens = replace(prepared.info, name=opened.name), prepared.tokens
    train, held_out = tokens.part(0, info.split), tokens.part(info.split, len(tokens))
    if len(train) <= block_size:
        raise DataError(
            f"data.source={opened.where} has {len(train):,} characters to train on "
            f"({len(tokens):,} less the held-out ones), but data.block_size={block_size} needs at "
            f"least {block_size + 1:,}. Use more text or a smaller block."
        )
    if len(held_out) < 2:
        raise DataError(
            f"data.source={opened.where} leaves {len(held_out)} of {len(tokens):,} characters held "
            "out; evaluation needs at least 2. Raise data.val_fraction or use more text."
        )
    return Corpus(info, prepared.tokenizer, train, held_out)
