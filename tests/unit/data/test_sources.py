"""Every kind of `data.source`, and the sentence for every mistake."""

import bz2
import gc
import gzip
import json
import lzma

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import data.reading.text
import data.sources
from data.columns import TextColumn
from data.corpus import prepare_corpus
from data.errors import DataError
from data.sources import open_source
from loopback_texts import serving

TEXT = "First line, é ü 日本 🙂\nsecond line\r\nthird line without an end"
ROWS = ["the first row", 'second, with "quotes"\n', "日本 and\ntwo lines", "last of four"]
JOINED = 'the first row\nsecond, with "quotes"\n日本 and\ntwo lines\nlast of four\n'
COMPRESS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda content: pa.compress(content, "zstd", asbytes=True),
}


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr("common.retries.FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr("data.reading.access.START_SECONDS", 0.1)


@pytest.fixture
def text_of(tmp_path):
    def text_of(source, text_column="text"):
        pieces = open_source(str(source), TextColumn(text_column), tmp_path / "cache").read()
        return "".join(piece["text"] for piece in pieces)

    return text_of


@pytest.fixture
def prepare(tmp_path):
    def prepare(source, text_column="text"):
        return prepare_corpus(
            str(source),
            text_column=text_column,
            val_fraction=0.1,
            block_size=4,
            cache_dir=tmp_path / "cache",
        )

    return prepare


@pytest.fixture
def complaint(prepare):
    """The one sentence that a person reads, whether at opening or in the middle."""

    def complaint(source, text_column="text"):
        with pytest.raises(DataError) as caught:
            prepare(source, text_column)
        sentence = str(caught.value)
        assert str(source) in sentence
        assert "cache_dir" not in sentence  # the text is at fault
        return sentence

    return complaint


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def jsonl(rows, column="text"):
    return "".join(json.dumps({"n": i, column: row}) + "\n" for i, row in enumerate(rows))


def csv(rows, column="text"):
    quoted = (f'{i},"' + row.replace('"', '""') + '"\n' for i, row in enumerate(rows))
    return f"n,{column}\n" + "".join(quoted)


def parquet(path, rows, column="text", **settings):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"n": list(range(len(rows))), column: rows})
    pq.write_table(table, path, **settings)
    return path


def test_python_carries_its_own_documentation(prepare):
    corpus = prepare("python-docs")

    assert corpus.info.documents > 70
    assert 400_000 < corpus.info.characters < 600_000


def test_python_carries_its_standard_library(text_of, tmp_path, monkeypatch):
    paths = data.sources._python_stdlib()
    assert len(paths) > 400
    assert not any({"site-packages", "test"} & set(path.parts) for path in paths)
    monkeypatch.setattr(data.sources, "_python_stdlib", lambda: paths[:3])

    assert text_of("python-stdlib").startswith(paths[0].read_text(encoding="utf-8"))


def test_one_text_file_is_taken_to_the_letter(text_of, tmp_path):
    assert text_of(put(tmp_path / "a.txt", TEXT)) == TEXT


@pytest.mark.parametrize("ending", ["md", "py", "log", "nothing"])
def test_any_other_file_is_a_text_too(text_of, tmp_path, ending):
    assert text_of(put(tmp_path / f"a.{ending}", TEXT)) == TEXT


@pytest.mark.parametrize("ending", COMPRESS)
def test_a_compressed_text_is_the_same_corpus(prepare, tmp_path, ending):
    plain = prepare(put(tmp_path / "a.txt", TEXT))
    packed = prepare(put(tmp_path / f"a.txt.{ending}", COMPRESS[ending](TEXT.encode())))

    assert packed.info.fingerprint == plain.info.fingerprint


def test_a_byte_order_mark_is_not_text(text_of, tmp_path):
    assert text_of(put(tmp_path / "a.txt", TEXT.encode("utf-8-sig"))) == TEXT
    assert text_of(put(tmp_path / "b.txt", "a\ufeffb" + TEXT)) == "a\ufeffb" + TEXT


@pytest.mark.parametrize("piece_bytes", [3, 4, 5, 7, 64])
def test_a_character_across_the_border_of_pieces_is_whole(
    text_of, tmp_path, monkeypatch, piece_bytes
):
    monkeypatch.setattr(data.reading.text, "PIECE_BYTES", piece_bytes)

    assert text_of(put(tmp_path / "a.txt", "\ufeff" + TEXT * 3)) == TEXT * 3
    packed = put(tmp_path / "b.txt.gz", gzip.compress((TEXT * 3).encode()))
    assert text_of(packed) == TEXT * 3


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.txt", "of a\nof b, ended\n"),
        ("[ab].t?t", "of a\nof b, ended\n"),
        ("**/*.txt", "of a\nof b, ended\nof c\n"),
    ],
)
def test_a_pattern_joins_its_files_by_name(prepare, text_of, tmp_path, pattern, expected):
    put(tmp_path / "b.txt", "of b, ended\n")
    put(tmp_path / "a.txt", "of a")
    put(tmp_path / "deep/er/c.txt", "of c")
    put(tmp_path / "deep/not.md", "never")
    (tmp_path / "folder.txt").mkdir()

    assert text_of(f"{tmp_path}/{pattern}") == expected
    assert prepare(f"{tmp_path}/{pattern}").info.documents == expected.count("of")


@pytest.mark.parametrize("column", ["text", "body"])
@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "csv", "csv.gz", "parquet"])
def test_each_row_of_a_table_is_a_document(prepare, text_of, tmp_path, ending, column):
    path = tmp_path / f"a.{ending}"
    if ending == "parquet":
        parquet(path, ROWS, column)
    else:
        content = (jsonl if "jsonl" in ending else csv)(ROWS, column).encode()
        put(path, gzip.compress(content) if ending.endswith("gz") else content)

    assert text_of(path, column) == JOINED
    assert prepare(path, column).info.documents == 4


def test_several_tables_are_joined(text_of, tmp_path):
    put(tmp_path / "a.jsonl", jsonl(ROWS[:2]))
    put(tmp_path / "b.jsonl", jsonl(ROWS[2:]))

    assert text_of(f"{tmp_path}/*.jsonl") == JOINED


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_null_and_empty_rows_are_no_documents(prepare, text_of, tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    rows = [None, *ROWS[:2], "", *ROWS[2:], None]
    if ending == "parquet":
        parquet(path, rows)
    else:
        put(path, jsonl(rows) if ending == "jsonl" else csv([row or "" for row in rows]))

    assert text_of(path) == JOINED
    assert prepare(path).info.documents == 4


def test_words_that_mean_nothing_elsewhere_are_text_in_csv(text_of, tmp_path):
    words = ["NA", "None", "null", "nan", "N/A", "True", "and a sentence"]

    assert text_of(put(tmp_path / "a.csv", csv(words))) == "\n".join(words) + "\n"


def test_numbers_in_a_csv_are_text_as_written(text_of, tmp_path):
    rows = ["a sentence"] * 10_000 + ["007"] * 10_000  # the reader guesses types by 10,000 rows

    assert text_of(put(tmp_path / "a.csv", csv(rows))) == "\n".join(rows) + "\n"


@pytest.mark.parametrize("name", ["nobody/has-this", "nor-this"])
def test_an_unknown_data_set_fails_at_once(complaint, monkeypatch, name):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)

    assert "neither a file here nor a data set" in complaint(name)


def test_a_missing_file_is_named(complaint, tmp_path):
    assert "there is no such file" in complaint(tmp_path / "missing.txt")
    assert "there is no such file" in complaint("missing.jsonl")
    assert "there is no such file" in complaint("not a name of anything")


def test_a_folder_without_tables_is_told_how_to_name_its_files(complaint, tmp_path):
    (tmp_path / "notes.txt").write_text("a text")
    assert "Texts are named by a pattern such as *.txt" in complaint(tmp_path)


def test_a_pattern_without_a_match_is_named(complaint, tmp_path):
    assert "matches no file" in complaint(tmp_path / "*.txt")


@pytest.mark.parametrize("ending", ["txt", "txt.gz", "jsonl", "csv", "parquet"])
def test_a_source_without_text_is_called_empty(complaint, tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    if ending == "parquet":
        parquet(path, pa.array([], pa.string()))
    else:
        put(path, gzip.compress(b"") if ending.endswith("gz") else b"")

    assert "empty" in complaint(path) or "no rows" in complaint(path)


def test_a_table_of_empty_rows_is_empty(complaint, tmp_path):
    reason = "no row of a.jsonl has a text in text"
    assert reason in complaint(put(tmp_path / "a.jsonl", jsonl([None, "", None])))


@pytest.mark.parametrize("piece_bytes", [3, 4, 7, 1 << 20])
@pytest.mark.parametrize(
    ("content", "offset"),
    [
        (b"caf\xe9 is latin", 3),
        ("日本".encode() + b"abc\xff", 9),
        (b"abcde\xe6\x97", 5),  # the first two bytes of three
        ("é".encode() + b"\xf0\x9f\x99", 2),
    ],
)
def test_a_byte_that_is_not_utf8_is_named_by_its_offset(
    complaint, tmp_path, monkeypatch, content, offset, piece_bytes
):
    monkeypatch.setattr(data.reading.text, "PIECE_BYTES", piece_bytes)
    path = put(tmp_path / "a.txt", content)

    assert f"{path.name} is not UTF-8: byte {offset} " in complaint(path)


def test_a_missing_column_is_told_with_those_there_are(complaint, tmp_path):
    path = put(tmp_path / "a.jsonl", jsonl(ROWS, "body"))

    assert "data.text_column=text" in complaint(path)
    assert "Its columns: n, body." in complaint(path)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])  # csv has no types
def test_a_column_that_is_not_text_is_told(complaint, tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    parquet(path, ROWS) if ending == "parquet" else put(path, jsonl(ROWS))

    sentence = complaint(path, "n")
    assert "data.text_column=n" in sentence
    assert "not text" in sentence


@pytest.mark.parametrize("before", [[None], ["text"] * 500])
def test_a_number_in_a_later_row_is_not_text_either(complaint, tmp_path, before):
    sentence = complaint(put(tmp_path / "a.jsonl", jsonl([*before, 5])))

    assert "data.text_column=text" in sentence
    assert "not text" in sentence


def test_tables_with_other_columns_are_told(complaint, tmp_path):
    put(tmp_path / "a.jsonl", jsonl(ROWS))
    put(tmp_path / "b.jsonl", jsonl(ROWS, "body"))

    complaint(tmp_path / "*.jsonl")


def test_files_of_several_formats_are_refused(complaint, tmp_path):
    put(tmp_path / "a.txt", TEXT)
    put(tmp_path / "b.jsonl", jsonl(ROWS))

    assert "mixes formats (.jsonl, .txt)" in complaint(tmp_path / "*.*")


@pytest.mark.parametrize("kind", COMPRESS)
def test_a_file_of_several_streams_is_read_to_its_end(tmp_path, text_of, kind):
    """As pbzip2, pigz and `cat` write them; xz and gzip may have NUL bytes between or after."""
    padding = bytes(8) if kind in ("bz2", "xz") else b""
    path = tmp_path / f"a.txt.{kind}"
    parts = [COMPRESS[kind](line.encode()) for line in TEXT.splitlines(keepends=True)]
    path.write_bytes(padding.join((*parts, b"")))
    assert text_of(path) == TEXT


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize("fault", ["another beginning", "truncated", "followed by text"])
def test_damage_in_a_later_stream_is_not_the_end_of_the_text(tmp_path, complaint, kind, fault):
    path = tmp_path / f"a.txt.{kind}"
    one, other = (COMPRESS[kind](TEXT.encode() * many) for many in (1, 100))
    end = {"truncated": other[:-9], "followed by text": other + b"plain"}
    path.write_bytes(one + end.get(fault, b"?" + other[1:]))
    assert "cannot be read" in complaint(path)


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("fault", ["truncated", "not compressed"])
def test_a_broken_compressed_text_is_told(complaint, tmp_path, ending, fault):
    whole = COMPRESS[ending]("".join(map(chr, range(0x400, 0x4000))).encode())
    content = whole[:-9] if fault == "truncated" else b"plain text"

    assert "cannot be read" in complaint(put(tmp_path / f"a.txt.{ending}", content))


SENTENCES = [f"sentence number {i}, " + "which is long " * 20 for i in range(25_000)]


def broken_table(folder, ending, where):
    """A table with one fault: in its first row, or after more than a reader reads at once."""
    rows = SENTENCES if where == "late" else []
    if ending == "parquet":
        path = parquet(folder / "a.parquet", SENTENCES[:1000], row_group_size=100)
        content = bytearray(path.read_bytes())
        if where == "late":
            at = pq.ParquetFile(path).metadata.row_group(9).column(1).data_page_offset
            content[at : at + 60] = b"\xff" * 60  # the pages of the last row group
        return put(path, bytes(content if where == "late" else content[:-20]))
    if ending == "jsonl":
        return put(folder / "a.jsonl", jsonl(rows) * 3 + '{"n": 0, "text": oops}\n')
    if ending == "csv":
        return put(folder / "a.csv", csv([*rows, "good"]) + "1,2,3,4\n")
    if ending == "latin1.csv":
        return put(folder / "a.csv", csv([*rows, "caf\u00e9"]).encode("latin1"))
    packed = gzip.compress((jsonl if "jsonl" in ending else csv)(rows or ROWS).encode(), 1)
    return put(folder / f"a.{ending}", packed[:-12])


@pytest.mark.parametrize("where", ["first", "late"])
@pytest.mark.parametrize("ending", ["jsonl", "csv", "latin1.csv", "parquet", "jsonl.gz", "csv.gz"])
def test_a_broken_table_is_told_wherever_it_is_broken(complaint, tmp_path, ending, where):
    path = broken_table(tmp_path, ending, where)

    assert "cannot be read" in complaint(path)


@pytest.fixture
def served():
    """Answers by path: (status line or code, headers, pieces of the body); what was asked."""
    answers = {}
    with serving(answers.__getitem__) as (address, asked):
        yield address, answers, asked


def test_a_url_is_fetched_once(text_of, served):
    address, answers, asked = served
    answers["/a.txt"] = (200, {"Content-Length": str(len(TEXT.encode()))}, [TEXT.encode()])
    answers["/b.jsonl.gz?raw=1"] = (200, {}, [gzip.compress(jsonl(ROWS).encode())])

    for _ in range(2):
        assert text_of(f"{address}/a.txt") == TEXT
        assert text_of(f"{address}/b.jsonl.gz?raw=1") == JOINED
    assert [path for path, _ in asked] == ["/a.txt", "/b.jsonl.gz?raw=1"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((404, {}, [b"no"]), "404"),
        ((200, {"Content-Length": "100"}, [b"only this"]), "received 9 bytes, expected 100"),
        (
            (200, {"Transfer-Encoding": "chunked"}, [b"5\r\nfirst\r\n9\r\nhalf"]),
            "cannot be reached",
        ),
        ((b"this is not HTTP\r\n\r\n", {}, []), "cannot be reached"),
        ((b"", {}, []), "cannot be reached"),
    ],
    ids=["404", "too short", "chunk cut off", "not HTTP", "hung up"],
)
def test_a_url_that_does_not_give_its_file_leaves_nothing(
    complaint, text_of, served, tmp_path, answer, reason
):
    address, answers, _ = served
    answers["/a.txt"] = answer

    assert reason in complaint(f"{address}/a.txt")
    gc.collect()  # an answer that was left open would warn here
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".lock"}

    answers["/a.txt"] = (200, {}, [TEXT.encode()])  # the next start is not misled
    assert text_of(f"{address}/a.txt") == TEXT


def test_a_server_that_is_not_there_is_told(complaint):
    sentence = complaint("http://127.0.0.1:1/a.txt")

    assert "cannot be reached" in sentence
    assert "give its path" in sentence
