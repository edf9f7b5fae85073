"""A text prepared for training: tokenizer, tokens on disk, split, fingerprint.

Prepared once and cached. The cache folder of a corpus holds `tokens.arrow`, the tokenizer's files
and `corpus.json`, and `datasets.load_from_disk` opens it. It is built under a temporary name and
renamed, so that it is whole or absent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import data.prepare
from common.shared_files import make_once, remove_abandoned
from data.columns import CONVERSATIONS, MASKED, PACKED, MessagesColumn, TextColumn
from data.documents import Documents
from data.errors import BrokenText, DataError, cache_error
from data.loader import EndlessText
from data.prepare import Preparation
from data.prepared import ALL_HELD_OUT, CorpusInfo, Damaged, Prepared, load_prepared
from data.progress import Progress
from data.sources import Source, open_source
from data.subwords import SubwordTokenizer
from data.token_file import TokenStream
from data.tokenizer import CHARACTERS, Tokenizer


@dataclass(frozen=True)
class Corpus:
    """A prepared text. `train` and `held_out` are disjoint; no window contains parts of both."""

    info: CorpusInfo
    tokenizer: Tokenizer
    train: TokenStream | Documents | EndlessText
    held_out: TokenStream | Documents
    ends: frozenset[int] = frozenset()
    """Tokens at which the model that is trained ends a text, besides the tokenizer's own."""

    def prompt(self) -> NDArray:
        """Tokens (T,) after which a sample begins: of conversations the first held-out question."""
        held_out = self.held_out
        if not isinstance(held_out, Documents):
            return self.tokenizer.encode(self.tokenizer.beginning)
        trained = held_out.trained.window(0, int(held_out.ends[0]))
        return held_out.tokens.window(0, int(np.argmax(trained)))

    @property
    def marks(self) -> frozenset[int]:
        """The tokens that end a turn of a conversation; none for a text."""
        if not isinstance(self.held_out, Documents):
            return frozenset()
        assert isinstance(self.tokenizer, SubwordTokenizer)
        return frozenset(self.tokenizer.marks.values())


def prepare_corpus(
    source: str,
    *,
    text_column: str,
    val_fraction: float,
    block_size: int,
    cache_dir: Path,
    tokenizer: str | Path = CHARACTERS,
    documents: str = PACKED,
    threads: int = 1,
    verify: bool = True,
    say: Callable[[str], None] | None = None,
) -> Corpus:
    """Load the corpus that `source` names, and prepare it first if the cache does not hold it.

    `tokenizer` is char, bpe:<size>, or the folder of a transformers tokenizer. A `val_fraction` of
    `ALL_HELD_OUT` holds out the whole text; `block_size` then has a meaning for conversations only,
    which are not longer. `documents` is one of DOCUMENT_MODES. `threads`, at most four,
    encode characters; subwords are encoded on all cores. `verify` reads all of the cached
    corpus, about a second a GB; one process of each machine should do it. `say` receives progress
    lines, from a thread, for what takes longer than a second.

    Raises DataError if the text is missing, unreadable, empty or shorter than a block, or if the
    cache cannot be used.
    """
    cache_dir = _expanded(cache_dir)
    with Progress(say) as progress:
        longest = block_size + 1 if documents == CONVERSATIONS else None
        kind = TextColumn if longest is None else MessagesColumn
        opened = open_source(source, kind(text_column), cache_dir, progress)
        wanted = Preparation(opened, tokenizer, val_fraction, longest)
        folder = cache_dir / wanted.key
        try:
            progress.doing(f"loading the prepared {opened.name}")
            if verify:
                remove_abandoned(folder, has_lock=False)
            prepared = _load_if_whole(folder, verify, progress, progress.say)
            if prepared is None:
                prepared = _prepare(wanted, folder, threads, progress)
            train, held_out = _parts(prepared, documents)
        except BrokenText as error:
            raise opened.rejected(error) from error
        except OSError as error:
            raise cache_error(cache_dir, error) from error
        except Damaged as error:
            raise DataError(
                f"data.cache_dir={cache_dir}: {folder} does not hold what was just written to it: "
                f"{error}. Start again, or name another folder."
            ) from error
    at_least = None if val_fraction == ALL_HELD_OUT else block_size
    _check_size(train, held_out, prepared, at_least, opened)
    # The cache may hold the name of another file with the same text: use the current name.
    info = replace(prepared.info, name=opened.name)
    if documents != PACKED:
        info = replace(info, fingerprint=info.fingerprint_of_documents)
    return Corpus(info, prepared.tokenizer, train, held_out)


def _expanded(cache_dir: Path) -> Path:
    try:
        return cache_dir.expanduser()
    except RuntimeError as error:
        raise DataError(
            f"data.cache_dir={cache_dir}: {error} Give the full path of the folder."
        ) from error


def _load_if_whole(
    folder: Path, verify: bool, progress: Progress, say: Callable[[str], None]
) -> Prepared | None:
    """Load a prepared text; None if it is absent or damaged, with a warning if it is damaged."""
    if not folder.exists():
        return None
    try:
        return load_prepared(folder, verify, progress)
    except Damaged as error:
        say(f"warning: the prepared text in {folder} is damaged: {error}. It is prepared again.")
        return None


def _prepare(wanted: Preparation, folder: Path, threads: int, progress: Progress) -> Prepared:
    progress.doing(f"waiting for another process that prepares {wanted.source.name}")
    make_once(
        folder,
        lambda building: data.prepare.build(wanted, building, threads, progress),
        lambda: _load_if_whole(folder, True, progress, lambda line: None) is not None,
    )
    return load_prepared(folder, False, progress)


def _parts(
    prepared: Prepared, documents: str
) -> tuple[TokenStream | Documents, TokenStream | Documents]:
    """What is trained on, and what is held out. Raises Damaged."""
    tokens, split = prepared.tokens, prepared.info.split
    if documents == MASKED:
        tokens = tokens.masked(prepared.ends())
    if documents in (PACKED, MASKED):
        return tokens.part(0, split), tokens.part(split, len(tokens))
    return prepared.documents(0, split), prepared.documents(split, len(tokens))


def _check_size(
    train: TokenStream | Documents,
    held_out: TokenStream | Documents,
    prepared: Prepared,
    block_size: int | None,
    opened: Source,
) -> None:
    """Refuse parts that are too short for `block_size`; without one, for an evaluation alone."""
    unit, everything = f"{prepared.tokenizer.unit}s", len(prepared.tokens)
    if block_size is not None and isinstance(train, TokenStream) and len(train) <= block_size:
        raise DataError(
            f"data.source={opened.where} has {len(train):,} {unit} to train on "
            f"({everything:,} less the held-out ones), but data.block_size={block_size} needs at "
            f"least {block_size + 1:,}. Use more text or a smaller data.block_size."
        )
    if len(held_out) < 2 and not prepared.has_targets:
        remedy = "Use" if block_size is None else "Raise data.val_fraction or use"
        raise DataError(
            f"data.source={opened.where} leaves {len(held_out)} of {everything:,} {unit} held "
            f"out; evaluation needs at least 2. {remedy} more text."
        )
    for name, part in (("training", train), ("held-out", held_out)):
        needed = name == "held-out" or block_size is not None
        if needed and isinstance(part, Documents) and not len(part.ends):
            left_out, longer = prepared.info.left_out, ""
            if left_out:
                longer = f": {left_out:,} are longer than data.block_size with their first reply"
            raise DataError(
                f"data.source={opened.where} has no {name} conversation{longer}. "
                f"Use more text{', or a larger data.block_size' if left_out else ''}."
            )
    if prepared.has_targets and not prepared.info.held_out_bytes:
        raise DataError(
            f"data.source={opened.where}: all held-out replies are empty. Raise data.val_fraction "
            "or use more conversations."
        )
