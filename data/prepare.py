"""Preparation of a text in passes and bounded memory: the folder that `data.corpus` loads.

Vocabulary, split and fingerprint depend on the text alone.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from datasets import IterableDataset
from datasets.iterable_dataset import ExamplesIterable
from numpy.typing import NDArray

from data.chat import TRAINING_DATE, ChatTemplate
from data.chunks import ROWS_AT_ONCE, Chunk, chunks_of, rows_of, utf8_bytes
from data.errors import BrokenText, DataError
from data.messages import ChatError, Conversation, texts_in
from data.prepared import ALL_HELD_OUT, FORMAT, TOKENS, CorpusInfo, save_info
from data.progress import Progress
from data.reading.rows import Source
from data.subwords import tokenizer_of, train_bpe
from data.token_file import NO_NUMBERS, TokenFile, TokenRows, write_tokens
from data.tokenizer import (
    CHARACTERS,
    CODE_POINTS,
    CharTokenizer,
    Tokenizer,
    bpe_size,
    code_points,
    lost_in,
)

MANY_DOCUMENTS = 100
"""With this many documents or more, the split is at the end of a document."""
CHATS_AT_ONCE = 256
NOTED_CHARACTERS = 1 << 18
"""So much text is looked through at once for its alphabet."""


@dataclass
class Encoded:
    """A row as tokens, and what is known of its text."""

    rows: TokenRows
    held_out: bool
    characters: int
    text_bytes: int
    """Of the text in UTF-8; of a conversation, of its targets."""
    left_out: bool = False
    """Whether it is a conversation whose first reply does not fit."""
    shortened: bool = False
    """Whether it is a conversation that lost turns to fit."""


def build(
    source: Source,
    chosen: str | Path,
    val_fraction: float,
    longest: int | None,
    progress: Progress,
    building: Path,
) -> None:
    """Write the files of a prepared text to the folder `building`, and flush them to the disk.

    `chosen` is char, bpe:<size>, or the folder of a tokenizer. With `longest` the documents are
    conversations, of at most so many tokens. Raises DataError if the text cannot be read, or
    changes meanwhile.
    """
    tokenizer = tokenizer_of(chosen) if isinstance(chosen, Path) else None
    where = f"data.tokenizer={chosen}"
    template = None if longest is None else ChatTemplate(tokenizer, where, TRAINING_DATE)
    progress.doing(f"reading {source.name}", unit="million characters")
    characters, ends, alphabet = _scan(source, chosen == CHARACTERS, progress)
    cut = _cut(source, characters, ends, val_fraction, only_ends=template is not None)
    if size := bpe_size(str(chosen)):
        progress.doing(f"training a vocabulary on {source.name}", cut)
        tokenizer = train_bpe(size, _counted(source, cut, progress), cut)
    elif tokenizer is None:
        tokenizer = CharTokenizer(alphabet)
    info = CorpusInfo(name=source.name)
    if chosen != CHARACTERS:
        texts = (text for text, _ in source.read())
        of_messages = chain.from_iterable(texts_in(json.loads(text)) for text in texts)
        info.lost, info.which = lost_in(of_messages if template else texts, tokenizer)
    progress.doing(f"encoding {source.name}", characters)
    if template is None or longest is None:
        rows = ({"row": row} for row in rows_of(source.read(), cut))
        parts = _mapped(rows, partial(_encode, tokenizer), ROWS_AT_ONCE)
    else:
        encode = partial(_encode_chats, template, longest, source.name)
        parts = _mapped(_conversations(source, cut), encode, CHATS_AT_ONCE)
    _write(parts, building, tokenizer, info, progress)
    file = TokenFile(building / TOKENS)
    places = file.ends.tobytes() + file.targets.tobytes()
    info.documents_fingerprint = hashlib.sha256(places).hexdigest()
    tokenizer.save(building)
    save_info(building, info)


def _mapped(
    rows: Iterable[Any], encode: Callable[[dict[str, list]], list[Encoded]], size: int
) -> Iterator[Encoded]:
    """The rows, encoded by `datasets` in batches of this many."""
    # IterableDataset.from_generator would pickle the generator, and make a folder in HF_HOME.
    dataset = IterableDataset(ExamplesIterable(lambda: enumerate(rows), {}))
    mapped = dataset.map(lambda batch: {"encoded": encode(batch)}, batched=True, batch_size=size)
    return (example["encoded"] for example in mapped)


def _encode(tokenizer: Tokenizer, batch: dict[str, list]) -> list[Encoded]:
    encoded = []
    for row, tokens in zip(batch["row"], tokenizer.encode_rows(batch["row"]), strict=True):
        characters = sum(len(chunk.text) for chunk in row)
        size = sum(utf8_bytes(chunk.text) for chunk in row)
        encoded.append(Encoded(tokens, row[0].held_out, characters, size))
    return encoded


def _conversations(source: Source, cut: int) -> Iterator[dict[str, Any]]:
    """Conversations as JSON; the one that begins at character `cut` is held out."""
    begin = 0
    for place, text in source.rows():
        yield {"place": place, "text": text, "held_out": begin >= cut}
        begin += len(text)


def _encode_chats(
    template: ChatTemplate, longest: int, name: str, batch: dict[str, list]
) -> list[Encoded]:
    """Conversations of at most so many tokens. Raises DataError for one that cannot be encoded."""
    found = []
    chats = zip(batch["place"], batch["text"], batch["held_out"], strict=True)
    for place, text, held_out in chats:
        try:
            chat = template.encode(Conversation.from_json(text), longest)
        except ChatError as error:
            raise DataError(f"data.source={name}: {place}: {error}.") from error
        if chat is None:
            rows = TokenRows(np.zeros(0, dtype=template.tokenizer.dtype), NO_NUMBERS)
            found.append(Encoded(rows, held_out, len(text), 0, left_out=True))
        else:
            targets = np.flatnonzero(np.diff(chat.trained, prepend=0, append=0))
            rows = TokenRows(chat.ids, np.array([len(chat.ids)]), targets)
            found.append(
                Encoded(rows, held_out, len(text), chat.text_bytes, shortened=chat.is_shortened)
            )
    return found


def _write(
    parts: Iterable[Encoded],
    building: Path,
    tokenizer: Tokenizer,
    info: CorpusInfo,
    progress: Progress,
) -> None:
    """Last pass: write the tokens to their file, and count them."""
    seen = np.zeros(tokenizer.vocab_size, dtype=bool)
    of_tokens = hashlib.sha256(tokenizer.identity)

    def counted() -> Iterator[TokenRows]:
        for part in parts:
            tokens, targets = part.rows.tokens, part.rows.targets
            predicted = int((targets[1::2] - targets[::2]).sum()) if len(targets) else len(tokens)
            if part.held_out:
                info.held_out_bytes += part.text_bytes
                info.held_out_targets += predicted
            else:
                info.train_bytes += part.text_bytes
                info.split += len(tokens)
            if tokenizer.unknown is not None:
                info.unknown += int(np.count_nonzero(tokens == tokenizer.unknown))
            info.documents += len(part.rows.ends)
            info.tokens += len(tokens)
            info.characters += part.characters
            info.left_out += part.left_out
            info.shortened += part.shortened
            if not seen.all():  # after a few rows a text has had every character
                seen[tokens] = True
            of_tokens.update(tokens.data)
            progress.done = info.characters
            yield part.rows

    write_tokens(building / TOKENS, counted(), tokenizer.dtype)
    of_tokens.update(f"\0{FORMAT}\0{info.split}".encode())
    info.fingerprint, info.different = of_tokens.hexdigest(), int(seen.sum())


def _scan(source: Source, by_characters: bool, progress: Progress) -> tuple[int, NDArray, str]:
    """First pass: how many characters there are, where documents end, and the alphabet.

    That has every character once, in code-point order; only for a tokenizer of characters.
    """
    seen = np.zeros(CODE_POINTS, dtype=bool)
    ends, characters = array("q"), 0
    waiting: list[str] = []  # rows may be short, and each call of numpy takes its time
    for text, ends_document in chain(source.read(), [("", False)]):  # to note the last ones
        waiting.append(text)
        characters += len(text)
        if ends_document:
            ends.append(characters)
        if not text or characters - progress.done >= NOTED_CHARACTERS:
            progress.done = characters
            points = code_points("".join(waiting) if by_characters else "")
            if not seen[points].all():  # writing is slower than reading
                seen[points] = True
            waiting.clear()
    if characters == 0:
        raise BrokenText(f"data.source={source.name} is empty: there is no text to train on.")
    return characters, np.array(ends, np.int64), "".join(map(chr, np.flatnonzero(seen)))


def _cut(
    source: Source, characters: int, ends: NDArray, val_fraction: float, only_ends: bool
) -> int:
    """The first held-out character; with many documents, the end of one nearest to the fraction.

    With `only_ends` it always is an end: conversations cannot be cut. Raises DataError for one
    conversation alone.
    """
    if val_fraction == ALL_HELD_OUT:
        return 0
    cut = int(characters * (1 - val_fraction))
    inner = ends[(ends > 0) & (ends < characters)]
    if only_ends and len(inner) == 0:
        raise DataError(
            f"data.source={source.name} has one conversation. Use two or more: some are held out."
        )
    if not only_ends and (len(ends) < MANY_DOCUMENTS or len(inner) == 0):
        return cut
    return int(inner[np.argmin(np.abs(inner - cut))])


def _counted(source: Source, cut: int, progress: Progress) -> Iterator[Chunk]:
    """The chunks from which a vocabulary is trained."""
    for chunk in chunks_of(source.read(), cut):
        yield chunk
        progress.done += len(chunk.text)
