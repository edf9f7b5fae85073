"""A text prepared with subwords: the same split as with characters, in any pieces and threads."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import accumulate, compress, pairwise
from subprocess import PIPE

import pytest
from tokenizers import Tokenizer

import data.prepare
import data.subwords
import tokenizer_kinds
from data.chunks import Chunk, batches_of, chunks_of
from data.errors import DataError
from data.streaming.windows import texts_as_tokens
from data.subwords import END_OF_TEXT
from runs import ROOT
from subword_folders import foreign_folder
from texts import lines_file, parts_of, written

TEXT = "".join(f"line {i} of the text, é ü 日本 🙂\n" for i in range(400))


@pytest.fixture
def prepare(prepare):
    return lambda source, tokenizer="bpe:300", **changes: prepare(
        source, tokenizer=tokenizer, **changes
    )


@pytest.mark.parametrize("tokenizer", ["char", "bpe:300"])
def test_text_tokens_and_bytes_are_counted_exactly(prepare, tmp_path, tokenizer):
    """Bits per byte are those of a model that gives every byte the same probability."""
    info = (corpus := prepare(written(tmp_path / "a.txt", TEXT), tokenizer)).info
    cut = int(len(TEXT) * 0.9)
    assert info.characters == len(TEXT)
    assert info.tokens == len(corpus.train) + len(corpus.held_out)
    assert info.split == len(corpus.train)
    assert info.train_bytes == len(TEXT[:cut].encode())
    assert info.held_out_bytes == len(TEXT[cut:].encode())
    nats = 0.7 * info.held_out_bytes  # over all held-out tokens
    assert info.bits_per_byte(nats / len(corpus.held_out)) == pytest.approx(1.00989, 1e-5)


def test_an_end_of_text_stands_after_every_document(prepare, tmp_path):
    documents = [f"document {i}" + " and more" * (i % 5) for i in range(120)]
    source = lines_file(tmp_path / "a.jsonl", documents)
    train, held_out = parts_of(prepare(source))
    assert (train + held_out).split(f"\n{END_OF_TEXT}") == [*documents, ""]
    assert train.endswith(END_OF_TEXT)  # many documents are split between two
    by_characters = parts_of(prepare(source, "char"))
    assert by_characters[1] == held_out.replace(END_OF_TEXT, "")


def test_the_vocabulary_is_of_the_training_text_alone(prepare, tmp_path):
    def vocabulary(end: str) -> dict[str, int]:
        corpus = prepare(written(tmp_path / "a.txt", TEXT + end))
        (tmp_path / "saved").mkdir(exist_ok=True)
        corpus.tokenizer.save(tmp_path / "saved")
        return Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json")).get_vocab()

    assert vocabulary("unheard " * 100) == vocabulary("unknown " * 100)
    assert vocabulary("unheard " * 100) != vocabulary("unheard " * 2000)


def test_the_vocabulary_of_a_long_text_sees_parts_from_all_over(monkeypatch):
    monkeypatch.setattr(data.subwords, "MOST_CHARACTERS", 100)
    chunks = [Chunk(f"{i:010d}", True, i >= 90) for i in range(100)]
    assert list(data.subwords._sample(chunks, 900)) == [chunk.text for chunk in chunks[:90:9]]
    assert list(data.subwords._sample(chunks, 100)) == [chunk.text for chunk in chunks[:90]]


@pytest.mark.parametrize("piece", [37, 1000])
def test_the_fingerprint_does_not_depend_on_the_pieces(prepare, tmp_path, monkeypatch, piece):
    monkeypatch.setattr("data.chunks.CHUNK_CHARACTERS", 333)
    source = written(tmp_path / "a.txt", TEXT)
    expected = prepare(source).info
    monkeypatch.setattr("data.reading.text.PIECE_BYTES", piece)
    assert prepare(source, cache="other").info == expected


def test_the_fingerprint_is_of_text_and_tokenizer(prepare, tmp_path):
    source = written(tmp_path / "a.txt", TEXT)
    others = [
        prepare(source, tokenizer).info.fingerprint
        for tokenizer in (
            *("bpe:300", "bpe:301", "char", foreign_folder(tmp_path / "theirs")),
            foreign_folder(tmp_path / "ends otherwise", eos_token="<s>"),
        )
    ]
    others.append(prepare(source, val_fraction=0.2).info.fingerprint)
    assert len(set(others)) == len(others)
    assert prepare(written(tmp_path / "same.txt", TEXT)).info.fingerprint == others[0]


SCRIPT = """
import sys
sys.path.insert(0, "tests/support")
import texts
print(texts.prepare(*sys.argv[1:], tokenizer="bpe:600").info.fingerprint)
"""


@pytest.mark.thorough
def test_any_number_of_threads_trains_the_same_vocabulary(tmp_path):
    """Of a text with many pairs that are equally frequent."""
    chosen = random.Random(3)
    words = ["".join(chosen.choices("abcdefgh", k=5)) for _ in range(3000)]
    source = written(tmp_path / "a.txt", " ".join(words * 2))
    fingerprints = set()
    for threads in ("RAYON_NUM_THREADS=1", "RAYON_NUM_THREADS=7", "TOKENIZERS_PARALLELISM=false"):
        command = ["env", threads, sys.executable, "-c", SCRIPT, source, tmp_path / threads]
        fingerprints.add(subprocess.run(command, cwd=ROOT, check=True, stdout=PIPE).stdout)
    assert len(fingerprints) == 1


def test_a_text_that_changes_between_the_passes_is_told(prepare, tmp_path, monkeypatch):
    source = written(tmp_path / "a.txt", TEXT)
    train = data.subwords.train_bpe

    def changed(*arguments):
        written(source, TEXT + "more")
        return train(*arguments)

    monkeypatch.setattr(data.prepare, "train_bpe", changed)
    with pytest.raises(DataError, match="has changed since"):
        prepare(source)


# Chunks.


def parts_of_size(text: str, ends: list[int], size: int):
    for begin, end in pairwise([0, *ends]):
        for start in range(begin, end, size):
            yield text[start : min(start + size, end)], start + size >= end


@pytest.mark.parametrize("seed", range(5))
def test_chunks_are_the_text_and_depend_on_it_alone(monkeypatch, seed):
    monkeypatch.setattr("data.chunks.CHUNK_CHARACTERS", 20)
    chosen = random.Random(seed)
    text = "".join(chosen.choices("ab \n", weights=[5, 5, 2, 1], k=400))
    ends = sorted({*chosen.sample(range(1, 400), 6), 400})
    cut = chosen.choice([*ends[:-1], 111, 399])
    expected = list(chunks_of(parts_of_size(text, ends, 400), cut))
    for size in (1, 7, 20, 399):
        assert list(chunks_of(parts_of_size(text, ends, size), cut)) == expected
    assert "".join(chunk.text for chunk in expected) == text
    assert "".join(chunk.text for chunk in expected if not chunk.held_out) == text[:cut]
    assert all(0 < len(chunk.text) <= 20 for chunk in expected)
    positions = accumulate(len(chunk.text) for chunk in expected)
    is_end = (chunk.ends_document for chunk in expected)
    assert [*compress(positions, is_end)] == ends


@pytest.mark.parametrize(
    ("text", "chunks"),
    [
        ("one two\nthree\nfour five six", ["one two\nthree\n", "four five six"]),
        ("one two three four five six", ["one two three", " four five six"]),
        ("x" * 30 + " y", ["x" * 14, "x" * 14, "xx y"]),
    ],
)
def test_a_chunk_ends_after_a_newline_or_before_a_space(monkeypatch, text, chunks):
    monkeypatch.setattr("data.chunks.CHUNK_CHARACTERS", 14)
    parts = parts_of_size(text, [len(text)], 5)
    assert [chunk.text for chunk in chunks_of(parts)] == chunks


LONG = {
    "words": ["the", "on it ", "Größe  ", "was\n", "\n\n  as", " ", "日本"],
    "indented": ["    ", "as\n", "it was\n"],
}


@pytest.mark.parametrize("kind", ["bytes", "bytes, trimmed"])
@pytest.mark.parametrize("name", LONG)
def test_a_long_document_has_the_tokens_of_its_whole(monkeypatch, kind, name):
    """GPT-2's words do not reach over the places where it is cut."""
    monkeypatch.setattr("data.chunks.CHUNK_CHARACTERS", 500)
    text = "".join(random.Random(1).choices(LONG[name], k=3000))
    tokenizer = tokenizer_kinds.tokenizer(kind)
    expected = [*tokenizer.encode(text).tolist(), tokenizer.end_of_text]
    parts = list(texts_as_tokens([text], tokenizer))
    assert [i for part in parts for i in part.tokens.tolist()] == expected


def test_a_batch_is_bounded_and_all_of_it_is_held_out_or_nothing(monkeypatch):
    for name, most in (("CHUNK_CHARACTERS", 100), ("CHARACTERS_AT_ONCE", 1000)):
        monkeypatch.setattr(f"data.chunks.{name}", most)
    monkeypatch.setattr("data.chunks.CHUNKS_AT_ONCE", 128)
    text = "a\n" * 30_000
    ends = [*range(2, 50_001, 2), 60_000]
    batches = list(batches_of(parts_of_size(text, ends, 777), 20_001))
    assert [one for batch in batches for one in batch] == list(
        chunks_of(parts_of_size(text, ends, 777), 20_001)
    )
    assert all(len({chunk.held_out for chunk in batch}) == 1 for batch in batches)
    assert max(sum(len(chunk.text) for chunk in batch) for batch in batches) <= 1100
    assert max(map(len, batches)) == 128
