"""Preparation of a text in passes and bounded memory: the folder that `data.corpus` loads.

Vocabulary, split and fingerprint depend on the text alone.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from datasets import IterableDataset
from datasets.iterable_dataset import ExamplesIterable
from numpy.typing import NDArray

from data.chat import TRAINING_DATE, ChatTemplate
from data.chunks import CHARACTERS_AT_ONCE, Chunk, batches_of, chunks_of, utf8_bytes
from data.errors import BrokenText, DataError
from data.messages import ChatError, Conversation, texts_in
from data.prepared import ALL_HELD_OUT, FORMAT, TOKENS, CorpusInfo
from data.progress import Progress
from data.reading.rows import Source
from data.subwords import tokenizer_of, train_bpe
from data.token_file import NO_NUMBERS, TokenRows, write_tokens
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
    characters, ends, alphabet = _scan(source, progress)
    cut = _cut(source, characters, ends, val_fraction, only_ends=template is not None)
    if size := bpe_size(str(chosen)):
        progress.doing(f"training a vocabulary on {source.name}", cut)
        tokenizer = train_bpe(size, _counted(source, cut, progress), cut)
    elif tokenizer is None:
        tokenizer = CharTokenizer(alphabet)
    info = CorpusInfo(name=source.name)
    if chosen != CHARACTERS:
        texts: Iterable[str] = (text for text, _ in source.read())
        if template is not None:
            texts = chain.from_iterable(texts_in(json.loads(text)) for text in texts)
        info.lost, info.which = lost_in(texts, tokenizer)
    progress.doing(f"encoding {source.name}", characters)
    if template is None or longest is None:
        rows = _mapped(batches_of(source.read(), cut), partial(_encode, tokenizer, info), 1)
    else:
        encode = partial(_encode_chats, template, longest, info)
        rows = _mapped(_conversations(source, cut), encode, CHATS_AT_ONCE)
    rows = _fingerprinted(rows, tokenizer, info, progress)
    write_tokens(building / TOKENS, rows, tokenizer.dtype, vars(info))
    tokenizer.save(building)
    for path in building.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def _mapped(
    examples: Iterable[Any], encode: Callable[[list[Any]], list[TokenRows]], size: int
) -> Iterator[TokenRows]:
    """The tokens of examples, which `datasets` has encoded in batches of this many."""
    numbered = ((number, {"example": example}) for number, example in enumerate(examples))
    # IterableDataset.from_generator would pickle the generator, and make a folder in HF_HOME.
    dataset = IterableDataset(ExamplesIterable(lambda: numbered, {}))
    mapped = dataset.map(
        lambda batch: {"rows": encode(batch["example"])}, batched=True, batch_size=size
    )
    return (example["rows"] for example in mapped)


def _encode(tokenizer: Tokenizer, info: CorpusInfo, batch: list[list[Chunk]]) -> list[TokenRows]:
    (chunks,) = batch
    rows = tokenizer.encode_chunks(chunks)
    characters = sum(len(chunk.text) for chunk in chunks)
    size = sum(utf8_bytes(chunk.text) for chunk in chunks)
    info.count(rows, chunks[0].held_out, characters, size)
    return [rows]


def _conversations(source: Source, cut: int) -> Iterator[tuple[str, str, bool]]:
    """The place of each conversation, its JSON, and whether it is held out: from `cut` on."""
    begin = 0
    for place, text in source.rows():
        yield place, text, begin >= cut
        begin += len(text)


def _encode_chats(
    template: ChatTemplate, longest: int, info: CorpusInfo, batch: list[tuple[str, str, bool]]
) -> list[TokenRows]:
    """Conversations of at most so many tokens. Raises DataError for one that cannot be encoded."""
    encoded = []
    for place, text, held_out in batch:
        try:
            chat = template.encode(Conversation.from_json(text), longest)
        except ChatError as error:
            raise DataError(f"data.source={info.name}: {place}: {error}.") from error
        if chat is None:
            info.left_out += 1
            rows = TokenRows(np.zeros(0, dtype=template.tokenizer.dtype), NO_NUMBERS)
        else:
            info.shortened += chat.is_shortened
            targets = np.flatnonzero(np.diff(chat.trained, prepend=0, append=0))
            rows = TokenRows(chat.ids, np.array([len(chat.ids)]), targets)
        info.count(rows, held_out, len(text), 0 if chat is None else chat.text_bytes)
        encoded.append(rows)
    return encoded


def _fingerprinted(
    parts: Iterable[TokenRows], tokenizer: Tokenizer, info: CorpusInfo, progress: Progress
) -> Iterator[TokenRows]:
    """The rows as they are. After the last one, `info` has their fingerprint."""
    of_tokens = hashlib.sha256(tokenizer.identity)
    for rows in parts:
        of_tokens.update(rows.tokens.data)
        progress.done = info.characters
        yield rows
    of_tokens.update(f"\0{FORMAT}\0{info.split}".encode())
    info.fingerprint = of_tokens.hexdigest()


def _scan(source: Source, progress: Progress) -> tuple[int, NDArray, str]:
    """First pass: how many characters there are, where documents end, and the alphabet.

    That has every character once, in code-point order.
    """
    seen = np.zeros(CODE_POINTS, dtype=bool)
    ends, characters, noted = array("q"), 0, 0
    waiting: list[str] = []  # rows may be short, and each call of numpy takes its time
    for text, ends_document in chain(source.read(), [("", False)]):  # to note the last ones
        waiting.append(text)
        characters += len(text)
        if ends_document:
            ends.append(characters)
        progress.done = characters
        if not text or characters - noted >= CHARACTERS_AT_ONCE:
            noted = characters
            points = code_points("".join(waiting))
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
