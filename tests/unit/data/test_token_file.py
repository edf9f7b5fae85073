"""Token files: `datasets` opens a prepared text and a window of a stream, which have one format."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, LargeList, Value, load_from_disk

import chats
import streams
from data.corpus import prepare_corpus
from data.token_file import TokenFile, TokenRows, joined, write_tokens

DOCUMENTS = [f"document {number}: {'the run resumes ' * (number % 9)}\n" for number in range(300)]


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


def prepared(source: Path, cache: Path, **settings):
    """A prepared text, and the data set that its folder is."""
    options = {"text_column": "text", "val_fraction": 0.1, "block_size": 48, **settings}
    corpus = prepare_corpus(str(source), cache_dir=cache, **options)
    (folder,) = [path.parent for path in cache.glob("*/corpus.json")]
    return corpus, load_from_disk(folder)


@pytest.mark.parametrize("tokenizer", ["char", "bpe:300"])
def test_datasets_opens_a_prepared_text_whose_rows_are_its_documents(tmp_path, tokenizer):
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    corpus, dataset = prepared(source, tmp_path / "cache", tokenizer=tokenizer)
    assert dataset.features["tokens"] == LargeList(Value(corpus.tokenizer.dtype.name))
    assert dataset.features["ends_document"] == Value("bool")
    end = "" if tokenizer == "char" else "<|endoftext|>"
    assert [corpus.tokenizer.decode(row["tokens"]) for row in dataset] == [
        text + end for text in DOCUMENTS
    ]
    assert all(dataset["ends_document"])
    tokens = [token for row in dataset for token in row["tokens"]]
    parts = (corpus.train, corpus.held_out)
    assert np.concatenate([part.window(0, len(part)) for part in parts]).tolist() == tokens


def test_a_row_of_a_text_without_documents_is_cut_where_the_held_out_part_begins(tmp_path):
    source = tmp_path / "a.txt"
    source.write_text("".join(DOCUMENTS))
    corpus, dataset = prepared(source, tmp_path / "cache")
    rows = [corpus.tokenizer.decode(row["tokens"]) for row in dataset]
    assert "".join(rows) == "".join(DOCUMENTS)
    assert len(rows[0]) == len(corpus.train)
    assert dataset["ends_document"][:] == [False, True]


def test_datasets_opens_conversations_with_their_targets(tmp_path):
    source = chats.write(
        tmp_path / "a.jsonl", [chats.said(f"{number}, is it?", "it is") for number in range(40)]
    )
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    chats.tokenizer().save(tokenizer)
    corpus, dataset = prepared(
        source, tmp_path / "cache", tokenizer=tokenizer, documents="conversations"
    )
    assert len(dataset) == 40
    train = corpus.train
    assert [*chain(*dataset["trained"][:36])] == train.trained.window(0, len(train)).tolist()
    assert [sum(row["trained"]) for row in dataset] == dataset["targets"][:]


def test_datasets_opens_a_window_of_a_stream_which_has_the_same_columns(tmp_path):
    folder = streams.lines_folder(tmp_path / "a", "a")
    corpus = streams.corpus(tmp_path / "cache", folder)
    (source,) = corpus.train.sources
    source.hold(0, 0).release()
    dataset = Dataset.from_file(str(source.cache.path(source.name(0, 0))))
    assert dataset.features == {
        "tokens": LargeList(Value("uint16")),
        "ends_document": Value("bool"),
    }
    encoded = source.encode(0, 0)
    assert [*chain(*dataset["tokens"])] == encoded.tokens.tolist()
    assert np.cumsum([len(row) for row in dataset["tokens"]]).tolist() == encoded.ends.tolist()


def test_rows_survive_a_file(tmp_path):
    """Empty documents, cut ones, and parts without any."""
    parts = [
        TokenRows(np.arange(5, dtype=np.uint8), np.array([0, 2, 2])),
        TokenRows(np.arange(0, dtype=np.uint8), np.array([], dtype=np.int64)),
        TokenRows(np.arange(3, dtype=np.uint8), np.array([1, 3])),
    ]
    write_tokens(str(tmp_path / "a"), parts, np.dtype(np.uint8))
    file, whole = TokenFile(tmp_path / "a"), joined(parts)
    assert file.ends().tolist() == whole.ends.tolist() == [0, 2, 2, 6, 8]
    found = [piece.tolist() for values in file.lists() for piece in values.pieces()]
    assert [*chain(*found)] == whole.tokens.tolist()
