"""A text made ready for training: vocabulary, tokens on disk, split, fingerprint.

Prepared once and cached. The cache folder of a corpus holds `tokens.arrow`, the tokenizer's files
and `corpus.json`; it is built beside its place and renamed, so that it is whole or absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from array import array
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset, Features, List, Value
from datasets.arrow_writer import ArrowWriter
from filelock import FileLock
from numpy.typing import NDArray

from data.errors import DataError
from data.sources import Source, open_source
from data.stream import TokenStream
from data.tokenizer import CODE_POINTS, CharTokenizer, code_points

FORMAT = 1
"""Part of every cache key and fingerprint: raise it when prepared corpora change."""
MANY_DOCUMENTS = 100
"""From this many documents on, whole ones are held out."""


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
    source: str, *, text_column: str, val_fraction: float, block_size: int, cache_dir: Path
) -> Corpus:
    """Load the corpus that `source` names, preparing it first where no cache holds it.

    Raises DataError where the text is missing, unreadable, empty or shorter than a block.
    """
    opened = open_source(source, text_column, cache_dir)
    settings = f"{FORMAT}\0{opened.key}\0{val_fraction!r}"
    folder = cache_dir / hashlib.sha256(settings.encode()).hexdigest()[:16]
    if not folder.exists():
        try:
            _prepare_once(opened, val_fraction, folder)
        except OSError as error:
            raise DataError(
                f"data.cache_dir={cache_dir}: the prepared text cannot be written: {error}. "
                "Free some room (one to four bytes a character) or name another folder."
            ) from error
    return _load(folder, block_size, opened.name)


def _prepare_once(opened: Source, val_fraction: float, folder: Path) -> None:
    """Build `folder`, unless another process of any machine that shares it was first."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = folder.with_name(f".{folder.name}.tmp")
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if folder.exists():
            return
        shutil.rmtree(building, ignore_errors=True)  # left by a process that was killed
        building.mkdir()
        try:
            _build(opened, val_fraction, building)
            building.rename(folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)


def _build(opened: Source, val_fraction: float, building: Path) -> None:
    tokenizer, ends, characters = _survey(opened)
    cut = _split(characters, ends, val_fraction)
    written, digest = _write_tokens(opened, tokenizer, building / "tokens.arrow")
    assert written == characters, "the source changed while it was read"
    digest.update(f"\0{FORMAT}\0{cut}".encode())
    info = CorpusInfo(opened.name, characters, len(ends), cut, digest.hexdigest())
    tokenizer.save(building)
    (building / "corpus.json").write_text(json.dumps(asdict(info), indent=2) + "\n")
    for file in building.iterdir():
        with open(file, "rb") as written_file:
            os.fsync(written_file.fileno())


def _survey(opened: Source) -> tuple[CharTokenizer, NDArray[np.int64], int]:
    """First pass: the vocabulary, where documents end, and how many characters there are."""
    seen = np.zeros(CODE_POINTS, dtype=bool)
    ends = array("q")
    characters = 0
    for piece in opened.read():
        points = code_points(piece["text"])
        seen[points] = True
        ends.extend(characters + end for end in piece["ends"])
        characters += len(points)
    if characters == 0:
        raise DataError(f"data.source={opened.name} is empty: there is no text to train on.")
    tokenizer = CharTokenizer("".join(map(chr, np.flatnonzero(seen))))
    return tokenizer, np.array(ends, dtype=np.int64), characters


def _split(characters: int, ends: NDArray[np.int64], val_fraction: float) -> int:
    """The first held-out character; of many documents, the end of one nearest to the fraction."""
    cut = int(characters * (1 - val_fraction))
    inner = ends[(ends > 0) & (ends < characters)]
    if len(ends) < MANY_DOCUMENTS or len(inner) == 0:
        return cut
    return int(inner[np.argmin(np.abs(inner - cut))])


def _write_tokens(
    opened: Source, tokenizer: CharTokenizer, path: Path
) -> tuple[int, hashlib._Hash]:
    """Second pass: encode into Arrow. Returns how many tokens, and a digest of them."""
    features = Features({"tokens": List(Value(tokenizer.dtype.name))})
    encoded = opened.pieces.map(
        _encode,
        batched=True,
        batch_size=1,  # pieces are large already
        remove_columns=["text", "ends"],
        fn_kwargs={"tokenizer": tokenizer},
        features=features,
    ).with_format("numpy")
    digest = hashlib.sha256(tokenizer.characters.encode())
    written = 0
    with ArrowWriter(path=str(path), features=features, writer_batch_size=8) as writer:
        for piece in encoded:
            tokens = np.asarray(piece["tokens"], dtype=tokenizer.dtype)
            digest.update(tokens.data)
            writer.write({"tokens": tokens})
            written += len(tokens)
        writer.finalize()
    return written, digest


def _encode(batch: dict[str, list], tokenizer: CharTokenizer) -> dict[str, list]:
    return {"tokens": [tokenizer.encode(text) for text in batch["text"]]}


def _load(folder: Path, block_size: int, name: str) -> Corpus:
    info = CorpusInfo(**json.loads((folder / "corpus.json").read_text()))
    tokens = TokenStream.from_dataset(Dataset.from_file(str(folder / "tokens.arrow")))
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
