"""Data sets of the Hub: texts to the letter, tables as from a file."""

from __future__ import annotations

import bz2
import errno
import gzip
import hashlib
import io
import json
import os
import subprocess
import sys

import pyarrow as pa
import pytest

from common import retries
from data.columns import TextColumn
from data.corpus import prepare_corpus
from data.errors import DataError, TextUnreachable
from data.progress import Progress
from data.reading import access as waiting
from data.sources import open_source
from hubs import lead_here
from loopback_hub import LoopbackHub
from loopback_texts import serving
from runs import ROOT
from stream_data import DATASET, ROWS, parquet_of, publish_dataset, ranges_of

TEXT = "\ufeffone\n\n\n  two\r\n\n日本\rthree\n\n\nfour, and no end"
LETTERS = TEXT.removeprefix("\ufeff")


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub, to which this process is led; failures pass quickly."""
    monkeypatch.setattr(retries, "FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(waiting, "START_SECONDS", 0.1)
    with LoopbackHub(tmp_path / "hub", new_port=True, use_xet=False) as hub:
        lead_here(hub, monkeypatch)
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", hub.endpoint)
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
        monkeypatch.setattr(
            "huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache of hub")
        )
        yield hub


@pytest.fixture
def repository(hub):
    """A data set of the hub; its name."""

    def repository(**files):
        publish_dataset(
            hub,
            {
                name.replace("_", "."): content if isinstance(content, bytes) else content.encode()
                for name, content in files.items()
            },
        )
        return DATASET

    return repository


@pytest.fixture
def hub_dataset(tmp_path):
    def hub_dataset(name, text_column, say=None):
        return open_source(name, TextColumn(text_column), tmp_path / "cache", Progress(say))

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
    name = repository(train1_txt=TEXT, train2_txt=TEXT)
    for number in (1, 2):
        (tmp_path / f"train{number}.txt").write_bytes(TEXT.encode())
    local = open_source(f"{tmp_path}/*.txt", TextColumn("text"), tmp_path)

    assert text_of(hub_dataset(name, "text")) == text_of(local) == (LETTERS + "\n") * 2


def test_another_split_is_not_read(hub_dataset, repository):
    folder = repository(train_txt=TEXT, test_txt="never")

    assert text_of(hub_dataset(folder, "text")) == LETTERS


def test_a_data_set_of_text_without_a_split_train_is_refused(hub_dataset, repository):
    with pytest.raises(DataError, match=r"split 'train'.*test"):
        hub_dataset(repository(test_txt=TEXT), "text")


def test_a_data_set_in_another_encoding_is_refused(hub_dataset, repository):
    card = "---\nconfigs:\n- config_name: default\n  data_files: '*.txt'\n  encoding: latin1\n---\n"
    folder = repository(train_txt=TEXT.encode("utf-8"), README_md=card)

    with pytest.raises(
        DataError, match=r"its card reads the files with encoding='latin1'.*" + COPY
    ):
        hub_dataset(folder, "text")


def test_a_table_of_the_hub_is_read_as_one_on_this_disk(hub_dataset, repository, tmp_path):
    words = ["NA", "None", "007", "and a sentence"]
    table = "n,text\n" + "".join(f"1,{word}\n" for word in words)

    assert text_of(hub_dataset(repository(train_csv=table), "text")) == "\n".join(words) + "\n"
    (tmp_path / "train.csv").write_text(table)
    local = open_source(f"{tmp_path}/train.csv", TextColumn("text"), tmp_path)
    assert text_of(local) == "\n".join(words) + "\n"


def test_json_of_the_hub_is_read_from_its_files(hub_dataset, repository):
    rows = [{"text": one, "n": n} for n, one in enumerate(['say "yes"', "2024-01-27", "a\\nb"])]
    rows[1]["n"] = {"a": 1}  # `datasets` would write all of the column as JSON
    folder = repository(train_jsonl="\n".join(map(json.dumps, rows)), test_jsonl="never")

    assert text_of(hub_dataset(folder, "text")) == 'say "yes"\n2024-01-27\na\\nb\n'
    with pytest.raises(DataError, match=r"row 1 of train\.jsonl cannot be read: .*holds int"):
        text_of(hub_dataset(folder, "n"))


COPY = r"data\.source=hf://datasets/\S+@refs/convert/parquet/default/train/"


def test_a_table_with_options_is_refused_with_the_name_of_its_copy(hub_dataset, repository):
    card = "---\nconfigs:\n- config_name: default\n  data_files: '*.csv'\n  sep: ';'\n---\n"
    folder = repository(train_csv="n;text\n1;NA\n2;007\n", README_md=card)

    with pytest.raises(DataError, match=r"its card reads the files with sep=';'.*" + COPY):
        hub_dataset(folder, "text")


def test_a_data_set_without_plain_files_is_refused_with_the_name_of_its_copy(
    hub_dataset, repository
):
    table, file = pa.table({"text": ["a", "b"]}), io.BytesIO()
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)

    with pytest.raises(DataError, match=r"no texts and no tables of one format.*" + COPY):
        hub_dataset(repository(train_arrow=file.getvalue()), "text")


def test_a_table_without_a_split_train_is_refused(hub_dataset, repository):
    with pytest.raises(DataError, match=r"split 'train'.*Its splits: test\."):
        hub_dataset(repository(test_csv="text\na\n"), "text")


def test_a_data_set_repository_gives_its_split_train(hub_dataset, hub):
    card = (
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        "  - split: train\n    path: data/train.parquet\n"
        "  - split: test\n    path: data/test.parquet\n---\nA data set.\n"
    )
    files = {"data/train.parquet": parquet_of(), "data/test.parquet": parquet_of(["never"])}
    publish_dataset(hub, {"README.md": card.encode(), **files})

    assert text_of(hub_dataset(DATASET, "text")) == "".join(text for _, text in ROWS)
    with pytest.raises(DataError, match=r"data\.text_column=body is not a column .*: id, text\."):
        text_of(hub_dataset(DATASET, "body"))


def test_a_second_start_requests_the_commit_alone(hub_dataset, repository, hub):
    name = repository(train_txt=TEXT)
    hub_dataset(name, "text")
    before = len(hub.requests)

    assert text_of(hub_dataset(name, "text")) == LETTERS
    assert [request.endpoint for request in hub.requests[before:]] == ["info"]


def test_another_commit_copies_what_has_changed(hub_dataset, repository, hub):
    hub_dataset(repository(train1_txt=TEXT, train2_txt="before"), "text")
    before = len(hub.requests)

    changed = hub_dataset(repository(train2_txt="after"), "text")
    assert text_of(changed) == LETTERS + "\nafter\n"
    assert [one.endpoint for one in hub.requests[before:]].count("resolve-get") == 1


def test_a_copy_that_fails_ends_the_others(hub_dataset, repository, hub, monkeypatch):
    monkeypatch.setattr("data.reading.copies.RANGE_BYTES", 1)
    name = repository(train1_txt="a" * 5000, train2_txt="b" * 5000)
    hub.fault("resolve-get", "status", status=404, after=20, times=1)
    before = len(hub.requests)
    with pytest.raises(DataError, match="HTTP 404"):
        hub_dataset(name, "text")
    assert len(hub.requests) - before < 1000


def test_a_start_without_the_hub_reads_an_earlier_download(hub_dataset, repository, hub, tmp_path):
    name = repository(train_txt=TEXT)
    hub_dataset(name, "text")
    hub.down()
    said = []

    assert text_of(hub_dataset(name, "text", said.append)) == LETTERS
    assert any(f"warning: {name} is read from an earlier download: " in line for line in said)
    (record,) = (tmp_path / "cache/hub").iterdir()
    record.write_bytes(b"damaged")
    with pytest.raises(TextUnreachable, match=f"data.source={name} cannot be reached"):
        hub_dataset(name, "text")


def test_a_copy_that_fails_is_continued(hub_dataset, repository, hub, monkeypatch):
    monkeypatch.setattr("data.reading.copies.RANGE_BYTES", 9)
    name = repository(train_txt=TEXT)
    hub.fault("resolve-get", "status", status=503, after=2, times=2)

    assert text_of(hub_dataset(name, "text")) == LETTERS


def test_a_disk_that_is_full_is_named(hub_dataset, repository, monkeypatch):
    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    name = repository(train_txt=TEXT)
    monkeypatch.setattr("data.reading.copies.os.fsync", full)
    with pytest.raises(DataError, match=r"data\.cache_dir=.*No space left.* Free some space"):
        hub_dataset(name, "text")


@pytest.mark.parametrize(("status", "kind"), [(429, TextUnreachable), (404, DataError)])
@pytest.mark.parametrize("endpoint", ["info", "tree"])
def test_a_rate_limit_of_the_hub_is_no_mistake_of_a_user(
    hub_dataset, repository, hub, monkeypatch, endpoint, status, kind
):
    monkeypatch.setattr(waiting, "START_RATE_LIMIT_SECONDS", 0.1)
    name = repository(train_txt=TEXT)
    hub.fault(endpoint, "status", status=status, times=None)
    with pytest.raises(DataError, match=f"HTTP {status}") as error:
        hub_dataset(name, "text")
    assert type(error.value) is kind


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            ValueError("Dataset 'me/words' doesn't exist on the Hub or cannot be accessed."),
            r"be accessed\. For a private data set of the Hub log in with `hf auth",
        ),
        (
            PermissionError(13, "Permission denied"),
            r"Permission denied\. Name a folder on another disk in HF_HOME\.",
        ),
    ],
)
def test_what_datasets_cannot_do_has_a_remedy(hub_dataset, repository, monkeypatch, error, reason):
    def refuse(name, **options):
        raise error

    monkeypatch.setattr("datasets.load_dataset_builder", refuse)
    with pytest.raises(DataError, match=reason):
        hub_dataset(repository(train_txt=TEXT), "text")


CSV = "n,text\n1,NA\n2,007\n3,a sentence\n"


COMMIT = "a" * 40
FILES = {"me/words": ("train.txt", TEXT.encode()), "me/table": ("train.csv", CSV.encode())}


def hub_s_answer(path, asked):
    """As much of the Hub's protocol as `datasets` speaks, for two data sets of one file each."""
    path = path.split("?")[0]
    repo = next(repo for repo in FILES if f"/datasets/{repo}" in path)
    name, content = FILES[repo]
    oid = hashlib.sha1(content).hexdigest()
    if path.endswith(f"/resolve/{COMMIT}/{name}"):
        return ranges_of({path: content}, asked, {})(path)
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
    with serving(lambda path: hub_s_answer(path, asked)) as (address, asked):
        there, _ = prepared(
            tmp_path,
            HF_ENDPOINT=address,
            HF_HUB_DISABLE_XET="1",
            HF_HUB_DISABLE_TELEMETRY="1",
        )
    later, said = prepared(tmp_path, HF_ENDPOINT=address, HF_HUB_OFFLINE="1")
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
