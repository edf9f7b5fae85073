"""Data sets of the Hub: texts to the letter, tables as from a file."""

from __future__ import annotations

import bz2
import errno
import gzip

import pytest

import texts
from common import retries
from data.columns import TextColumn
from data.errors import DataError, TextUnreachable
from data.progress import Progress
from data.reading import access as reading
from data.reading.rows import open_source
from hubs import lead_here
from loopback_hub import LoopbackHub
from stream_data import DATASET, publish_dataset

TEXT = "\ufeffone\n\n\n  two\r\n\n日本\rthree\n\n\nfour, and no end"
LETTERS = TEXT.removeprefix("\ufeff")
COPY = r"data\.source=hf://datasets/\S+@refs/convert/parquet/default/train/"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub, to which this process is led; failures pass quickly."""
    monkeypatch.setattr(retries, "FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(reading, "START_SECONDS", 0.1)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    with LoopbackHub(tmp_path / "hub", new_port=True, use_xet=False) as hub:
        lead_here(hub, monkeypatch)
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", hub.endpoint)
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "of hub"))
        yield hub


@pytest.fixture
def publish(hub):
    """Publishes files, by names with _ for dots; the name of their data set."""

    def publish(**files):
        encoded = {
            name.replace("_", "."): content if isinstance(content, bytes) else content.encode()
            for name, content in files.items()
        }
        publish_dataset(hub, encoded)
        return DATASET

    return publish


@pytest.fixture
def text_of(tmp_path):
    def text_of(name, text_column="text", say=None):
        opened = open_source(name, TextColumn(text_column), tmp_path / "cache", Progress(say))
        return "".join(text for text, _ in opened.read())

    return text_of


def card(lines):
    return f"---\nconfigs:\n- config_name: default\n{lines}---\n"


@pytest.mark.parametrize(
    ("name", "pack"),
    [("train_txt", bytes), ("train_txt_gz", gzip.compress), ("train_txt_bz2", bz2.compress)],
)
def test_a_data_set_of_text_is_kept_to_the_letter(text_of, publish, name, pack):
    assert text_of(publish(**{name: pack(TEXT.encode())}, test_txt="never")) == LETTERS
    second = name.replace("train", "train2")
    assert text_of(publish(**{second: pack(TEXT.encode())})) == (LETTERS + "\n") * 2


@pytest.mark.parametrize("name", ["test_txt", "test_csv"])
def test_a_data_set_without_a_split_train_is_refused(text_of, publish, name):
    with pytest.raises(DataError, match=r"split 'train'.*Its splits: test\."):
        text_of(publish(**{name: "text\na\n"}))


def test_options_of_a_card_are_refused_with_the_name_of_a_copy(text_of, publish):
    lines = "  data_files: '*.csv'\n  sep: ';'\n"
    published = publish(train_csv="n;text\n1;NA\n", README_md=card(lines))
    with pytest.raises(DataError, match=rf"its card reads the files with sep=';'\. .*{COPY}"):
        text_of(published)


def test_a_later_start_requests_the_commit_and_what_has_changed(text_of, publish, hub):
    name = publish(train1_txt=TEXT, train2_txt="before")
    text_of(name)
    before = len(hub.requests)
    text_of(name)
    assert [request.endpoint for request in hub.requests[before:]] == ["info"]

    before = len(hub.requests)
    assert text_of(publish(train2_txt="after")) == LETTERS + "\nafter\n"
    assert [one.endpoint for one in hub.requests[before:]].count("resolve-get") == 1


def test_a_start_without_the_hub_reads_an_earlier_download(text_of, publish, hub, tmp_path):
    name = publish(train_txt=TEXT)
    text_of(name)
    hub.down()
    said = []

    assert text_of(name, say=said.append) == LETTERS
    assert any(f"warning: {name} is read as at an earlier start: " in line for line in said)
    (record,) = (tmp_path / "cache/hub").iterdir()
    record.write_bytes(b"damaged")
    with pytest.raises(TextUnreachable, match=f"data.source={name} cannot be reached"):
        text_of(name)


def test_a_disk_that_is_full_is_named(text_of, publish, monkeypatch):
    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    name = publish(train_txt=TEXT)
    monkeypatch.setattr("data.reading.copies.os.fsync", full)
    with pytest.raises(DataError, match=r"data\.cache_dir=.*No space left.* Free some space"):
        text_of(name)


@pytest.mark.parametrize(("status", "kind"), [(429, TextUnreachable), (404, DataError)])
@pytest.mark.parametrize("endpoint", ["info", "tree"])
def test_a_rate_limit_of_the_hub_is_no_mistake_of_a_user(
    text_of, publish, hub, monkeypatch, endpoint, status, kind
):
    monkeypatch.setattr(reading, "START_RATE_LIMIT_SECONDS", 0.1)
    name = publish(train_txt=TEXT)
    hub.fault(endpoint, "status", status=status, times=None)
    with pytest.raises(DataError, match=f"HTTP {status}") as error:
        text_of(name)
    assert type(error.value) is kind


def test_what_datasets_cannot_do_is_told(text_of, publish, monkeypatch):
    def refuse(name, **options):
        raise ValueError("BuilderConfig 'default' is missing")

    monkeypatch.setattr("datasets.load_dataset_builder", refuse)
    with pytest.raises(DataError, match=r"configuration cannot be read: BuilderConfig 'default'"):
        text_of(publish(train_txt="a text"))


@pytest.mark.parametrize("file", ["train.txt", "train.csv"])
def test_a_text_has_one_fingerprint_wherever_it_comes_from(publish, hub, tmp_path, file):
    content = TEXT if file == "train.txt" else "n,text\n1,NA\n2,007\n3,a sentence\n"
    (tmp_path / file).write_text(content, newline="")
    name = publish(**{file.replace(".", "_"): content})

    def fingerprint(source, cache):
        return texts.prepare(source, tmp_path / cache, block_size=4).info.fingerprint

    there = fingerprint(name, "cache")
    hub.down()
    assert fingerprint(name, "cache") == there == fingerprint(str(tmp_path / file), "another")
