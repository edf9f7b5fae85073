"""Files of tables and texts, made by hypothesis, each with what `json`, `csv` and pyarrow read."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from pathlib import Path

import pyarrow as pa
from hypothesis import strategies as st
from pyarrow import parquet

COMPRESS = {
    ".gz": lambda content: gzip.compress(content, 1),
    ".bz2": bz2.compress,
    ".xz": lambda content: lzma.compress(content, preset=0),
    ".zst": lambda content: pa.compress(content, "zstd", asbytes=True),
}


def pack(compression: str, content: bytes) -> bytes:
    """Compress in two streams, one after another, as parallel compressors do."""
    if not compression:
        return content
    middle = len(content) // 2
    return b"".join(map(COMPRESS[compression], (content[:middle], content[middle:])))


TELLING = ["2024-01-27", "2024-01-27T10:00:00Z", "NA", "null", "None", "007", "1e5", "true"]
TELLING += ["", " ", "\n", "\r\n", 'say "yes"', '"', "\\", "\\n", "a,b;c\td", "\ufeffmark"]
TELLING += ["[1]", "{}", "\u2028\u2029\x85\x1c", "\x00", "日本 🙂 é"]
CHARACTERS = st.characters(exclude_categories=["Cs"])
TEXTS = st.sampled_from(TELLING) | st.text(CHARACTERS, max_size=30)
RAW = TEXTS.map(lambda text: text.replace("\0", "\1"))
"""Where nothing escapes them, many zero bytes are a sign of UTF-16."""
WORDS = st.sampled_from(["id", "n", "text2", "meta", "Ünï", 'with "quotes"', "a.b"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant"]), "content": TEXTS},
        optional={"name": TEXTS, "tool_calls": VALUES},
    ),
    min_size=1,
    max_size=3,
)
MORE = {"text": "some", "messages": [{"role": "user", "content": "some"}]}
"""Most files have a row with a text: the others are refused."""
KINDS = ("lines", "array", "csv", "tsv", "parquet", "text")


def rows_of(column, values):
    """Rows with other keys, which come and go; the column may come late, be null or be absent."""
    others = st.dictionaries(WORDS, VALUES, max_size=3)
    own = st.fixed_dictionaries({}, optional={column: values})
    row = st.tuples(others, own, st.booleans()).map(
        lambda parts: {**parts[0], **parts[1]} if parts[2] else {**parts[1], **parts[0]}
    )
    return st.lists(row, min_size=1, max_size=8).flatmap(
        lambda rows: st.sampled_from([rows, *([*rows, {column: MORE[column]}] for _ in range(3))])
    )


@st.composite
def json_lines(draw, column, values):
    rows = draw(rows_of(column, values))
    end = draw(st.sampled_from(["\n", "\r\n"]))
    ascii_only = draw(st.booleans())
    parts = []
    for row in rows:
        parts += [draw(st.sampled_from(["", " \t"]))] * draw(st.sampled_from([0, 0, 0, 1]))
        parts.append(json.dumps(row, ensure_ascii=ascii_only))
    text = end.join(parts) + draw(st.sampled_from(["", end]))
    content = text.encode(draw(st.sampled_from(["utf-8", "utf-8-sig"])))
    decoded = content.decode("utf-8-sig")
    read = [json.loads(line) for line in decoded.split("\n") if line.strip()]
    return ".jsonl", content, read


@st.composite
def json_array(draw, column, values):
    rows = draw(rows_of(column, values))
    indent = draw(st.sampled_from([None, 1]))
    text = json.dumps(rows, ensure_ascii=draw(st.booleans()), indent=indent)
    text = draw(st.sampled_from(["", "\n "])) + text + draw(st.sampled_from(["", "\r\n"]))
    content = text.encode(draw(st.sampled_from(["utf-8", "utf-8-sig"])))
    return draw(st.sampled_from([".json", ".jsonl"])), content, json.loads(text)


@st.composite
def delimited(draw, column, values, suffix):
    names = draw(st.lists(WORDS, unique=True, max_size=3))
    delimiter = "\t" if suffix == ".tsv" else ","
    names.insert(draw(st.integers(0, len(names))), column)
    rows = draw(st.lists(st.lists(RAW, min_size=len(names), max_size=len(names)), max_size=8))
    into = io.StringIO(newline="")
    writer = csv.writer(
        into,
        delimiter=delimiter,
        lineterminator=draw(st.sampled_from(["\n", "\r\n"])),
        quoting=draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])),
    )
    rows.append(["some"] * len(names))
    more = [""] * draw(st.sampled_from([0, 0, 1]))  # as where each line ends with a delimiter
    writer.writerows([[*row, *more] for row in [names, *rows]])
    content = into.getvalue().encode(draw(st.sampled_from(["utf-8", "utf-8-sig"])))
    text = content.decode("utf-8-sig")
    return suffix, content, list(csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter))


COLUMNS = {
    "int": (pa.int64(), st.none() | st.integers(-(2**63), 2**63 - 1)),
    "float": (pa.float32(), st.none() | st.floats(width=32, allow_nan=False)),
    "date": (pa.timestamp("us"), st.none() | st.datetimes()),
    "null": (pa.null(), st.none()),
    "texts": (pa.list_(pa.string()), st.none() | st.lists(TEXTS, max_size=2)),
    "pair": (
        pa.struct([("a", pa.int8()), ("b", pa.string())]),
        st.none() | st.fixed_dictionaries({"a": st.integers(0, 9), "b": TEXTS}),
    ),
}
MESSAGES_TYPE = pa.list_(pa.struct({one: pa.string() for one in ("role", "content", "name")}))
PLAIN_MESSAGES = st.lists(
    st.fixed_dictionaries({"role": TEXTS, "content": TEXTS, "name": st.none() | TEXTS}), max_size=3
)


@st.composite
def parquet_table(draw, column):
    """A table whose other columns are other ones in each file."""
    count = draw(st.integers(1, 8))
    if column == "text":
        own = st.none() | TEXTS
        kind = draw(st.sampled_from([pa.string(), pa.large_string(), pa.string_view()]))
    else:
        own, kind = PLAIN_MESSAGES, MESSAGES_TYPE
    arrays = {column: pa.array(draw(st.lists(own, min_size=count, max_size=count)), kind)}
    arrays[column] = pa.concat_arrays([arrays[column][1:], pa.array([MORE[column]], kind)])
    for name in draw(st.lists(st.sampled_from(sorted(COLUMNS)), unique=True, max_size=3)):
        type_of, values = COLUMNS[name]
        found = draw(st.lists(values, min_size=count, max_size=count))
        arrays[draw(st.sampled_from([name, "meta", f"{column}.x"]))] = pa.array(found, type_of)
    names = draw(st.permutations(sorted(arrays)))
    table = pa.table({name: arrays[name] for name in names})
    has_lists = any(pa.types.is_list(field.type) for field in table.schema)
    into = io.BytesIO()
    parquet.write_table(
        table,
        into,
        row_group_size=draw(st.integers(1, 9)),
        compression=draw(st.sampled_from(["none", "snappy", "zstd", "gzip"])),
        use_dictionary=draw(st.booleans()),
        # pyarrow 26 cannot read back lists of pages of a row each.
        data_page_size=1 << 20 if has_lists else draw(st.sampled_from([1, 1 << 20])),
    )
    return ".parquet", into.getvalue(), parquet.ParquetFile(into).read().to_pylist()


@st.composite
def plain_text(draw):
    text = draw(st.sampled_from(["", "\ufeff"])) + "\n".join(draw(st.lists(RAW, max_size=5)))
    return ".txt", text.encode(), [{"text": text.removeprefix("\ufeff")}]


@st.composite
def files(draw, column="text", kinds=KINDS):
    """Files of one format: names, contents and the rows of each, in the order of their names."""
    kind = draw(st.sampled_from(kinds))
    texts = st.none() | TEXTS if column == "text" else MESSAGES
    one = {
        "lines": lambda: json_lines(column, texts),
        "array": lambda: json_array(column, texts),
        "csv": lambda: delimited(column, texts, ".csv"),
        "tsv": lambda: delimited(column, texts, ".tsv"),
        "parquet": lambda: parquet_table(column),
        "text": plain_text,
    }[kind]()
    found = []
    for number in range(draw(st.integers(1, 3))):
        suffix, content, rows = draw(one)
        packed = draw(st.sampled_from(["", *COMPRESS])) if kind != "parquet" else ""
        found.append((f"{number}{suffix}{packed}", pack(packed, content), rows))
    return found


def write(folder: Path, made) -> None:
    for name, content, _ in made:
        (folder / name).write_bytes(content)
