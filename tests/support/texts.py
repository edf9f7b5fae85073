"""Texts that are prepared with the settings of most tests, and what is in them."""

from __future__ import annotations

import json
from pathlib import Path

from config.schema import DataConfig
from data.corpus import Corpus, prepare_corpus

TEXT = "".join(f"line {i} of the text, é ü 日本\n" for i in range(400))


def prepare(source: Path | str, cache: Path | str, **changes) -> Corpus:
    own = {key: changes.pop(key) for key in ("tokenizer", "say") if key in changes}
    keys = {"source": str(source), "block_size": 8, "cache_dir": str(cache)} | changes
    return prepare_corpus(DataConfig(**keys), **own)


def written(path: Path, text: str) -> Path:
    """A file with these characters, line ends included."""
    path.write_bytes(text.encode())
    return path


def lines_file(path: Path, documents: list[str]) -> Path:
    """JSON lines with a text each."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def tokens_of(part) -> list[int]:
    """All tokens of the training or the held-out part of a text."""
    return part.window(0, len(part)).tolist()


def parts_of(corpus: Corpus) -> tuple[str, str]:
    """The text that is trained on, and the one that is held out."""
    decode = corpus.tokenizer.decode
    return decode(tokens_of(corpus.train)), decode(tokens_of(corpus.held_out))


def text_of(corpus: Corpus) -> str:
    return "".join(parts_of(corpus))


def conversations_of(corpus: Corpus) -> list[tuple[list[int], list[int]]]:
    """The tokens of each conversation, and which of them are targets."""
    found = []
    for part in (corpus.train, corpus.held_out):
        begin = 0
        for end in part.ends.tolist():
            place = begin, end - begin
            found.append((part.tokens.window(*place).tolist(), part.are_targets(*place).tolist()))
            begin = end
    return found
