"""`python -m data inspect`: what a data set holds, before anything is trained on it."""

from __future__ import annotations

import pytest

from config.compose import load_config
from data import __main__ as inspection
from data.__main__ import main, parse
from stream_data import TEXTS, lines_of, write_parquet
from subword_folders import trained

BYTES = sum(len(text.encode()) + 1 for text in TEXTS if text)
"""Each row ends with a newline."""
WITH_TEXT = sum(bool(text) for text in TEXTS)


@pytest.fixture
def inspect(tmp_path, capsys):
    def inspect(source, *arguments):
        code = main(["inspect", str(source), f"--cache-dir={tmp_path}/cache", *arguments])
        shown = capsys.readouterr()
        found = {line[:10].strip(): line[10:] for line in shown.out.splitlines()}
        return code, found, shown.err

    return inspect


def test_files_rows_columns_and_tokens_of_parquet(inspect, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(7):
        write_parquet(folder / f"{number}.parquet")
    size = sum(path.stat().st_size for path in folder.iterdir())
    code, shown, _ = inspect(folder)

    assert code == 0
    assert shown["files"] == f"7 of Parquet, {size:,} bytes"
    assert shown["columns"] == "id (int64), text (string)"
    assert shown["rows"] == f"about {7 * WITH_TEXT:,} with text, in 56 groups"
    assert shown["row 1"] == TEXTS[1]
    tokens = 7 * (BYTES + WITH_TEXT)  # an end of text after each row
    assert shown["tokens"] == f"about {tokens:,} in an epoch, by bytes"


def test_a_tokenizer_s_own_tokens_are_counted(inspect, tmp_path):
    tokenizer = trained()
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "a.jsonl").write_bytes(lines_of(TEXTS))
    _, shown, _ = inspect(tmp_path / "a.jsonl", "--tokenizer", str(tmp_path / "tokenizer"))

    tokens = sum(len(tokenizer.encode(f"{text}\n")) + 1 for text in TEXTS if text)
    assert shown["tokens"].startswith(f"about {tokens:,} in an epoch, by ")
    assert shown["columns"] == "id (int), text (str)"


def test_of_a_large_data_set_a_sample_from_all_over_is_read(inspect, tmp_path, monkeypatch):
    monkeypatch.setattr(inspection, "SAMPLE_BYTES", 1)
    read = []
    original = inspection.read_group
    monkeypatch.setattr(
        inspection, "read_group", lambda *given, **more: read.append(1) or original(*given, **more)
    )
    code, _, _ = inspect(write_parquet(tmp_path / "a.parquet"))
    assert (code, len(read)) == (0, 1)
    for count in (1, 2, 3, 7, 8, 9, 100):
        groups = list(inspection._spread(tuple(range(count))))
        assert sorted(groups) == list(range(count))
        assert groups[:1] == [0]


def test_rows_cannot_control_a_terminal(inspect, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines_of(["\x1b[31mred\u202eder " + "x" * 500]))
    _, shown, _ = inspect(tmp_path / "a.jsonl")
    assert shown["row 1"].startswith(r"\x1b[31mred\u202eder xxx")
    assert len(shown["row 1"]) < 130


def test_a_mistake_is_a_sentence_with_the_argument_and_code_2(inspect, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines_of(TEXTS))
    code, _, error = inspect(tmp_path / "a.jsonl", "--text-column=body")
    assert code == 2
    assert error.startswith("error: --text-column=body is not a column of ")
    assert inspect(tmp_path / "none.jsonl")[0] == 2
    code, _, error = inspect(tmp_path / "a.jsonl", "--tokenizer=none")
    assert (code, "none" in error) == (2, True)


def test_the_defaults_are_those_of_the_default_run():
    config, options = load_config([]), parse(["inspect", "a"])
    assert options.text_column == config.data.text_column
    assert str(options.cache_dir) == config.data.cache_dir
