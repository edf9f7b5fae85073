"""Preparing a corpus: cache, split, fingerprint, and what a kill leaves behind."""

import numpy as np
import pytest

import data.prepare
from data.errors import DataError
from data.prepare import MANY_DOCUMENTS
from texts import TEXT, lines_file, parts_of, text_of, tokens_of, written


def cached(tmp_path):
    """The folders and files in the cache, without its locks, by name: when each was written."""
    paths = [path for path in (tmp_path / "cache").rglob("*") if path.suffix != ".lock"]
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in paths}


@pytest.mark.parametrize(("characters", "dtype"), [(256, "uint8"), (257, "uint16")])
def test_tokens_are_stored_in_the_smallest_type(prepare, tmp_path, characters, dtype):
    text = "".join(map(chr, range(0x400, 0x400 + characters)))
    corpus = prepare(written(tmp_path / "a.txt", text))
    assert corpus.train.tokens.dtype == np.dtype(dtype)
    assert tokens_of(corpus.train) == list(range(len(corpus.train)))


@pytest.mark.parametrize("val_fraction", [0.1, 0.25, 0.005, 0.9])
def test_one_document_is_split_at_the_fraction(prepare, tmp_path, val_fraction):
    corpus = prepare(written(tmp_path / "a.txt", TEXT), val_fraction=val_fraction)
    assert corpus.info.split == len(corpus.train) == int(len(TEXT) * (1 - val_fraction))
    assert text_of(corpus) == TEXT
    assert (corpus.info.characters, corpus.info.documents) == (len(TEXT), 1)
    assert corpus.tokenizer.characters == "".join(sorted(set(TEXT)))


@pytest.mark.parametrize("val_fraction", [0.1, 0.5, 0.02, 0.97])
@pytest.mark.parametrize("rows", [MANY_DOCUMENTS, 333])
def test_many_documents_are_split_at_the_nearest_end_of_one(prepare, tmp_path, rows, val_fraction):
    rng = np.random.default_rng(0)
    documents = [f"{i}:" + "x" * int(rng.integers(5, 60)) + "\n" for i in range(rows)]
    corpus = prepare(lines_file(tmp_path / "a.jsonl", documents), val_fraction=val_fraction)
    ends = np.cumsum([len(document) for document in documents])
    wanted = int(ends[-1] * (1 - val_fraction))
    inner = ends[:-1]
    assert corpus.info.split in inner
    assert abs(corpus.info.split - wanted) == np.abs(inner - wanted).min()
    assert parts_of(corpus)[0].endswith("\n")


def test_a_second_preparation_reads_the_first_until_the_text_changes(
    prepare, tmp_path, monkeypatch
):
    source = written(tmp_path / "a.txt", TEXT)
    first, before = prepare(source), cached(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(data.prepare, "build", lambda *_: pytest.fail("built again"))
        second = prepare(source, block_size=16)  # blocks are no part of what is prepared
    assert second.info == first.info
    assert cached(tmp_path) == before
    changed = prepare(written(source, TEXT + "!"))
    assert changed.info.characters == first.info.characters + 1
    assert len(cached(tmp_path)) == 2 * len(before)


def test_the_fingerprint_is_of_the_text_and_its_split(prepare, tmp_path):
    base = prepare(written(tmp_path / "a.txt", TEXT)).info.fingerprint
    assert prepare(written(tmp_path / "same.txt", TEXT)).info.fingerprint == base
    assert prepare(tmp_path / "a.txt", val_fraction=0.2).info.fingerprint != base
    # Another letter; and the same tokens by number, but of other characters.
    for name, words in (("b.txt", ("line 7 ", "lime 7 ")), ("c.txt", ("日", "月"))):
        changed = written(tmp_path / name, TEXT.replace(*words))
        assert prepare(changed).info.fingerprint != base


def test_parts_that_are_too_short_are_refused(prepare, tmp_path):
    source = written(tmp_path / "a.txt", "x" * 100)
    assert len(prepare(source, block_size=89).train) == 90
    reason = r"a\.txt has 90 characters .* data\.block_size=90 needs at least 91 and 2\. Use"
    with pytest.raises(DataError, match=reason):
        prepare(source, block_size=90)
    assert len(prepare(source, val_fraction=0.02).held_out) == 2
    with pytest.raises(DataError, match=r"99 characters .* 1 held out; .* at least 9 and 2\. Use"):
        prepare(source, val_fraction=0.01)


def test_a_preparation_that_fails_leaves_nothing(prepare, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    source = written(tmp_path / "a.txt", TEXT)
    with monkeypatch.context() as patched:
        patched.setattr("data.tokenizer.CharTokenizer.save", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(source)
    assert not cached(tmp_path)
    assert prepare(source).info.characters == len(TEXT)
