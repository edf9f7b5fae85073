"""Texts that are prepared with the settings of most tests, and what is in them."""

from __future__ import annotations

import json
from pathlib import Path

from data.corpus import Corpus, prepare_corpus

TEXT = "".join(f"line {i} of the text, é ü 日本\n" for i in range(400))


def prepare(source: Path | str, cache: Path | str, **changes) -> Corpus:
    settings = {"text_column": "text", "val_fraction": 0.1, "block_size": 8} | changes
    return prepare_corpus(str(source), cache_dir=Path(cache), **settings)


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
