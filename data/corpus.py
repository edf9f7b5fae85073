"""A text prepared for training: tokenizer, tokens on disk, split, fingerprint.

Prepared once and cached. The cache folder of a corpus holds `tokens.bin` (data/token_file.py) and
the tokenizer's files. It is built under a temporary name and renamed, so it is whole or absent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from common.printable import reason_of
from common.shared_files import make_once
from data.columns import CONVERSATIONS, MASKED, PACKED, MessagesColumn, TextColumn
from data.documents import Documents
from data.errors import Damaged, DataError, cache_error
from data.loader import Text
from data.prepared import ALL_HELD_OUT, FORMAT, TOKENS, CorpusInfo
from data.progress import Progress
from data.reading.rows import open_source
from data.subwords import SubwordTokenizer, tokenizer_of
from data.token_file import TokenFile, TokenStream
from data.tokenizer import CHARACTERS, Tokenizer
from data.tokenizer_files import folder_key


@dataclass(frozen=True)
class Corpus:
    """A prepared text. `train` and `held_out` are disjoint; no window contains parts of both."""

    info: CorpusInfo
    tokenizer: Tokenizer
    train: Text | Documents
    held_out: TokenStream | Documents
    ends: frozenset[int] = frozenset()
    """Tokens at which the model that is trained ends a text, besides the tokenizer's own."""

    def prompt(self) -> NDArray:
        """Tokens (T,) after which a sample begins: of conversations the first held-out question."""
        held_out = self.held_out
        if not isinstance(held_out, Documents):
            return self.tokenizer.encode(self.tokenizer.beginning)
        return held_out.tokens.window(0, int(held_out.targets[0]))

    @property
    def marks(self) -> frozenset[int]:
        """The tokens that end a turn of a conversation; none for a text."""
        if not isinstance(self.held_out, Documents):
            return frozenset()
        assert isinstance(self.tokenizer, SubwordTokenizer)
        return frozenset(self.tokenizer.marks.values())


def prepare_corpus(
    data: Any,
    tokenizer: str | Path = CHARACTERS,
    say: Callable[[str], None] | None = None,
) -> Corpus:
    """Load the corpus of the keys `data.*`, and prepare it first if the cache does not hold it.

    `tokenizer` is char, bpe:<size>, or the folder of a transformers tokenizer. A `val_fraction` of
    `ALL_HELD_OUT` holds out the whole text; `block_size` then has a meaning for conversations only,
    which are not longer. `say` receives progress lines, from a thread, for what takes longer than
    a second.

    Raises DataError if the text is missing, unreadable, empty or shorter than a block, or if the
    cache cannot be used.
    """
    cache_dir = Path(data.cache_dir)
    with suppress(RuntimeError):  # the home of an unknown user
        cache_dir = cache_dir.expanduser()
    with Progress(say) as progress:
        longest = data.block_size + 1 if data.documents == CONVERSATIONS else None
        kind = TextColumn if longest is None else MessagesColumn
        opened = open_source(data.source, kind(data.text_column), cache_dir, progress)
        chosen = folder_key(tokenizer) if isinstance(tokenizer, Path) else tokenizer
        parts = FORMAT, opened.key, repr(data.val_fraction), chosen, longest
        key = hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]
        folder = cache_dir / key
        try:
            progress.doing(f"loading the prepared {opened.name}")
            try:
                corpus = _load(folder, data.documents)
            except Damaged as error:
                if folder.exists():
                    progress.say(f"warning: {error}. It is prepared again.")
                progress.doing(f"waiting for another process that prepares {opened.name}")
                from data.prepare import build  # imports `datasets`, which most starts do not need

                make_once(
                    folder,
                    partial(build, opened, tokenizer, data.val_fraction, longest, progress),
                    lambda: _is_whole(folder, data.documents),
                )
                corpus = _load(folder, data.documents)
        except OSError as error:
            raise cache_error(cache_dir, error) from error
    _check_size(corpus, None if data.val_fraction == ALL_HELD_OUT else data.block_size, opened.name)
    # The cache may hold the name of another file with the same text: use the current name.
    return replace(corpus, info=replace(corpus.info, name=opened.name))


def _is_whole(folder: Path, documents: str) -> bool:
    """Whether another process has prepared the text meanwhile."""
    try:
        _load(folder, documents)
    except Damaged:
        return False
    return True


def _load(folder: Path, documents: str) -> Corpus:
    """The text in a folder. Raises Damaged if it is not whole or not there, and OSError."""
    try:
        file, tokenizer = TokenFile(folder / TOKENS), tokenizer_of(folder)
        info = CorpusInfo(**file.facts)
    except (
        FileNotFoundError,
        NotADirectoryError,
        IsADirectoryError,
        TypeError,
        ValueError,
    ) as error:
        raise Damaged(
            f"the prepared text in {folder} cannot be loaded: {reason_of(error)}"
        ) from error
    bounds = ((0, info.split), (info.split, len(file)))
    parts: list[Any]
    if documents == CONVERSATIONS:
        parts = [Documents.of(file, *part) for part in bounds]
    else:
        ends = file.ends if documents == MASKED else None
        parts = [TokenStream(file, *part, ends) for part in bounds]
    if documents != PACKED:
        places = hashlib.sha256(file.ends.tobytes() + file.targets.tobytes()).hexdigest()
        info.fingerprint = hashlib.sha256(f"{info.fingerprint}{places}".encode()).hexdigest()
    return Corpus(info, tokenizer, *parts)


def _check_size(corpus: Corpus, block_size: int | None, name: str) -> None:
    """Refuse parts that are too short for `block_size`; without one, for an evaluation alone."""
    info, train, held_out = corpus.info, corpus.train, corpus.held_out
    if isinstance(train, Documents) and isinstance(held_out, Documents):
        unit, sizes, least = "conversation", (len(train.ends), len(held_out.ends)), (1, 1)
    else:
        unit, sizes = corpus.tokenizer.unit, (info.split, len(held_out))
        least = ((block_size or 0) + 1, 2)
    if block_size is None:
        least = (0, least[1])
    if sizes[0] < least[0] or sizes[1] < least[1]:
        needs = "an evaluation" if block_size is None else f"data.block_size={block_size}"
        long = f", and {info.left_out:,} longer than data.block_size" * bool(info.left_out)
        raise DataError(
            f"data.source={name} has {sizes[0]:,} {unit}s to train on and {sizes[1]:,} "
            f"held out{long}; {needs} needs at least {least[0]:,} and {least[1]:,}. "
            "Use more text, another data.val_fraction, or another data.block_size."
        )
    if not info.held_out_bytes:
        raise DataError(
            f"data.source={name}: all held-out replies are empty. Raise data.val_fraction "
            "or use more conversations."
        )
