"""Data sets of the Hub: texts to the letter, tables as from a file."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pyarrow as pa
import pytest

from data.columns import TextColumn
from data.corpus import prepare_corpus
from data.errors import DataError, TextUnreachable
from data.progress import Progress
from data.sources import _hub_dataset, open_source
from loopback_texts import serving
from runs import ROOT

TEXT = "\ufeffone\n\n\n  two\r\n\n日本\rthree\n\n\nfour, and no end"
LETTERS = TEXT.removeprefix("\ufeff")


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture
def repository(tmp_path):
    """A data set as the Hub has it, in a folder: the same builders read it."""

    def repository(**files):
        folder = tmp_path / "repository"
        folder.mkdir()
        for name, content in files.items():
            data = content if isinstance(content, bytes) else content.encode()
            (folder / name.replace("_", ".")).write_bytes(data)
        return str(folder)

    return repository


@pytest.fixture
def hub_dataset(tmp_path):
    def hub_dataset(name, text_column):
        return _hub_dataset(name, TextColumn(text_column), tmp_path / "cache", Progress())

    return hub_dataset


def text_of(source):
    return "".join(piece["text"] for piece in source.read())


@pytest.mark.parametrize(
    ("name", "pack"),
    [("train_txt", bytes), ("train_txt_gz", gzip.compress), ("train_txt_bz2", bz2.compress)],
)
def test_a_data_set_of_text_is_kept_to_the_letter(hub_dataset, repository, name, pack):
    source = hub_dataset(repository(**{name: pack(TEXT.encode())}), "text")

    assert text_of(source) == text_of(source) == LETTERS


def test_a_data_set_of_several_texts_reads_as_their_pattern(hub_dataset, repository, tmp_path):
    folder = repository(train1_txt=TEXT, train2_txt=TEXT)
    local = open_source(f"{folder}/*.txt", TextColumn("text"), tmp_path)

    assert text_of(hub_dataset(folder, "text")) == text_of(local) == (LETTERS + "\n") * 2


def test_another_split_is_not_read(hub_dataset, repository):
    folder = repository(train_txt=TEXT, test_txt="never")

    assert text_of(hub_dataset(folder, "text")) == LETTERS


def test_a_text_has_no_other_column_than_its_text(hub_dataset, repository):
    with pytest.raises(DataError, match=r"data\.text_column=body is not a column .*: text\."):
        hub_dataset(repository(train_txt=TEXT), "body")


def test_a_data_set_of_text_without_a_split_train_is_refused(hub_dataset, repository):
    with pytest.raises(DataError, match=r"split 'train'.*test"):
        hub_dataset(repository(test_txt=TEXT), "text")


def test_a_data_set_in_another_encoding_is_refused(hub_dataset, repository):
    card = "---\nconfigs:\n- config_name: default\n  data_files: '*.txt'\n  encoding: latin1\n---\n"
    folder = repository(train_txt=TEXT.encode("utf-8"), README_md=card)

    with pytest.raises(DataError, match="in latin1; only UTF-8 is read"):
        hub_dataset(folder, "text")


def test_a_table_of_the_hub_is_read_as_one_on_this_disk(hub_dataset, repository, tmp_path):
    words = ["NA", "None", "007", "and a sentence"]
    folder = repository(train_csv="n,text\n" + "".join(f"1,{word}\n" for word in words))

    assert text_of(hub_dataset(folder, "text")) == "\n".join(words) + "\n"
    local = open_source(f"{folder}/train.csv", TextColumn("text"), tmp_path)
    assert text_of(local) == "\n".join(words) + "\n"


def test_json_of_the_hub_is_read_from_its_files(hub_dataset, repository):
    rows = [{"text": one, "n": n} for n, one in enumerate(['say "yes"', "2024-01-27", "a\\nb"])]
    rows[1]["n"] = {"a": 1}  # `datasets` would write all of the column as JSON
    folder = repository(train_jsonl="\n".join(map(json.dumps, rows)), test_jsonl="never")

    assert text_of(hub_dataset(folder, "text")) == 'say "yes"\n2024-01-27\na\\nb\n'
    with pytest.raises(DataError, match=r"row 1 of train\.jsonl cannot be read: .*holds int"):
        text_of(hub_dataset(folder, "n"))


COPY = r"data\.streaming=true data\.source=hf://datasets/\S+@refs/convert/parquet/default/train/"


def test_a_table_with_options_is_refused_with_the_name_of_its_copy(hub_dataset, repository):
    card = "---\nconfigs:\n- config_name: default\n  data_files: '*.csv'\n  sep: ';'\n---\n"
    folder = repository(train_csv="n;text\n1;NA\n2;007\n", README_md=card)

    with pytest.raises(DataError, match=r"its card reads the files with sep=';'.*" + COPY):
        hub_dataset(folder, "text")


def test_a_data_set_without_plain_files_is_refused_with_the_name_of_its_copy(
    hub_dataset, repository
):
    table, folder = pa.table({"text": ["a", "b"]}), repository()
    with pa.ipc.new_stream(f"{folder}/train.arrow", table.schema) as writer:
        writer.write_table(table)

    with pytest.raises(DataError, match=r"no texts and no tables of one format.*" + COPY):
        hub_dataset(folder, "text")


def test_a_table_without_a_split_train_is_refused(hub_dataset, repository):
    with pytest.raises(DataError, match=r"split 'train'.*the splits test"):
        hub_dataset(repository(test_csv="text\na\n"), "text")


def test_a_cache_of_data_sets_that_cannot_be_used_is_named(
    hub_dataset, repository, tmp_path, monkeypatch
):
    folder = repository(train_txt=TEXT)

    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("datasets.load_dataset_builder", refused)
    with pytest.raises(DataError, match=r"Permission denied\. Name a folder .* HF_DATASETS_CACHE"):
        hub_dataset(folder, "text")


@pytest.mark.parametrize("damage", ["", "{}", '["gone.txt"]', "[3]", "nonsense"])
def test_removed_files_make_no_copy_of_a_data_set(
    hub_dataset, repository, tmp_path, monkeypatch, damage
):
    folder = repository(train_txt=TEXT)
    hub_dataset(folder, "text")
    (record,) = (tmp_path / "cache/hub").iterdir()
    monkeypatch.setattr("datasets.load_dataset_builder", unreachable)
    assert text_of(hub_dataset(folder, "text")) == LETTERS

    record.write_text(damage)
    with pytest.raises(DataError, match="neither a file here nor a data set"):
        hub_dataset(folder, "text")


def unreachable(*_, **__):
    raise ConnectionError("no network")


@pytest.mark.parametrize(("status", "kind"), [(429, TextUnreachable), (404, DataError)])
def test_a_rate_limit_of_the_hub_is_no_mistake_of_a_user(hub_dataset, monkeypatch, status, kind):
    def refused(*_, **__):
        error = RuntimeError(f"HTTP {status}")
        error.response = SimpleNamespace(status_code=status)
        raise error

    monkeypatch.setattr("datasets.load_dataset_builder", refused)
    with pytest.raises(DataError, match=f"HTTP {status}") as error:
        hub_dataset("me/words", "text")
    assert type(error.value) is kind


CSV = "n,text\n1,NA\n2,007\n3,a sentence\n"


COMMIT = "a" * 40
FILES = {"me/words": ("train.txt", TEXT.encode()), "me/table": ("train.csv", CSV.encode())}


def hub_s_answer(path):
    """As much of the Hub's protocol as `datasets` speaks, for two data sets of one file each."""
    path = path.split("?")[0]
    repo = next(repo for repo in FILES if f"/datasets/{repo}" in path)
    name, content = FILES[repo]
    oid = hashlib.sha1(content).hexdigest()
    if path.endswith(f"/resolve/{COMMIT}/{name}"):
        return answered(content, ETag=f'"{oid}"', X_Repo_Commit=COMMIT)
    if "/resolve/" in path:
        return answered({}, status=404, X_Error_Code="EntryNotFound")
    if path.endswith("/data"):
        return answered([])
    if "/tree/" in path:
        return answered([{"type": "file", "path": name, "oid": oid, "size": len(content)}])
    return answered({"id": repo, "sha": COMMIT, "siblings": [], "private": False})


def answered(content, status=200, **headers):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return status, {**named, "Content-Length": str(len(body))}, [body]


PREPARE = """
import sys
from pathlib import Path
from data.corpus import prepare_corpus
for name in ("me/words", "me/table"):
    corpus = prepare_corpus(
        name, text_column="text", val_fraction=0.1, block_size=4, cache_dir=Path(sys.argv[1]),
        say=lambda line: print(line, file=sys.stderr),
    )
    print(corpus.info.name, corpus.info.fingerprint)
"""


def prepared(tmp_path, **environment):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    result = subprocess.run(
        [sys.executable, "-c", PREPARE, str(tmp_path / "cache")],
        cwd=ROOT,
        env={**kept, "HF_HOME": str(tmp_path / "home"), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return dict(line.split() for line in result.stdout.splitlines()), result.stderr


@pytest.mark.thorough
def test_a_text_has_one_fingerprint_wherever_it_comes_from(tmp_path):
    with serving(hub_s_answer) as (address, _):
        there, _ = prepared(
            tmp_path,
            HF_ENDPOINT=address,
            HF_HUB_DISABLE_XET="1",
            HF_HUB_DISABLE_TELEMETRY="1",
        )
    later, said = prepared(tmp_path, HF_HUB_OFFLINE="1")
    local = {}
    for name, (file, content) in FILES.items():
        (tmp_path / file).write_bytes(content)
        corpus = prepare_corpus(
            str(tmp_path / file),
            text_column="text",
            val_fraction=0.1,
            block_size=4,
            cache_dir=tmp_path / "other",
        )
        local[name] = corpus.info.fingerprint

    assert there == later == local
    assert "warning: me/words is read from an earlier download" in said
