"""Data sets of the Hub, prepared and streamed: to the letter, and no row is lost to a fault."""

from __future__ import annotations

import errno
import json
import threading
import time
from contextlib import closing
from functools import partial

import pytest
from huggingface_hub import constants

import texts
from common import retries
from data.columns import TextColumn
from data.errors import BrokenText, DataError, TextUnreachable
from data.progress import Progress
from data.reading import access as waiting
from data.reading.access import Access
from data.reading.parquet import _footer_of
from data.reading.rows import list_source, open_source, read_group
from hubs import lead_here
from loopback_hub import LoopbackHub
from stream_data import DATASET, ROWS, TEXTS, lines_of, parquet_of, publish_dataset

FILES = f"hf://datasets/{DATASET}/data"
SECRET = "hf_aTokenThatNobodySees"
BOTH = [text for _, text in ROWS] * 2
"""The texts of the data set."""
TEXT = "one\n\n\n  two\r\n\n日本\rthree\n\n\nfour, and no end"


@pytest.fixture
def dataset_hub(tmp_path, monkeypatch):
    """A hub with a data set of two files, to which this process is led; failures pass quickly."""
    monkeypatch.setattr(retries, "FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(retries, "LONGEST_DELAY_SECONDS", 0.05)
    monkeypatch.setattr(waiting, "TIMEOUT_SECONDS", 0.3)
    with LoopbackHub(new_port=True, use_xet=False) as hub:
        hub.lfs_above = 1000
        lead_here(hub, monkeypatch)
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", hub.endpoint)
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "of hub"))
        publish_dataset(hub, {f"data/train-{n}.parquet": parquet_of() for n in range(2)})
        yield hub


@pytest.fixture
def access(tmp_path):
    lines = []
    with closing(Access(tmp_path / "cache", lines.append)) as access:
        access.lines = lines
        yield access


@pytest.fixture
def publish(dataset_hub):
    """Publishes files; the name of their data set."""

    def publish(files):
        encoded = {name: content.encode() for name, content in files.items()}
        publish_dataset(dataset_hub, encoded, "me/texts")
        return "me/texts"

    return publish


@pytest.fixture
def text_of(tmp_path):
    """The text of a source that is prepared."""

    def text_of(name, say=None):
        opened = open_source(name, TextColumn("text"), tmp_path / "cache", Progress(say))
        return "".join(text for text, _ in opened.read())

    return text_of


def requests_of(hub, before=0):
    return [one.endpoint for one in hub.requests[before:]]


def texts_of(listing, access):
    groups = [read_group(listing, group, access) for group in listing.groups]
    return [text for group in groups for text in group]


def test_a_listing_costs_a_footer_a_file_and_a_group_one_range(dataset_hub, access, tmp_path):
    _footer_of.cache_clear()
    listing = list_source(FILES, "text", access)
    assert requests_of(dataset_hub).count("blob-get") == len(listing.files) == 2
    assert requests_of(dataset_hub).count("tree") == 1
    with closing(Access(tmp_path / "cache")) as later:  # of another process
        before = len(dataset_hub.requests)
        assert list_source(FILES, "text", later, listing.revision) == listing
        assert "tree" not in requests_of(dataset_hub, before)

        read_group(listing, listing.groups[0], later)
        before = len(dataset_hub.requests)
        for group in listing.groups[1:4]:
            read_group(listing, group, later)
        assert requests_of(dataset_hub, before) == ["resolve-get", "blob-get"] * 3


def test_of_many_files_none_is_opened_before_its_rows_are_read(dataset_hub, access, monkeypatch):
    monkeypatch.setattr("data.reading.rows.FEW_FILES", 3)
    monkeypatch.setattr("data.reading.parquet.PART_BYTES", 3000)
    monkeypatch.setattr("data.reading.lines.GROUP_BYTES", 3000)
    array = json.dumps([{"text": text} for text in TEXTS]).encode()
    kinds = {"parquet": parquet_of(group=9), "jsonl": lines_of(TEXTS), "json": array}
    for kind, content in kinds.items():
        publish_dataset(dataset_hub, {f"{kind}/{n}.{kind}": content for n in range(4)})
        before = len(dataset_hub.requests)
        listing = list_source(f"hf://datasets/{DATASET}/{kind}", "text", access)
        assert "blob-get" not in requests_of(dataset_hub, before)
        assert len(listing.groups) == (4 if kind == "json" else -(-len(content) // 3000) * 4)
        assert texts_of(listing, access) == BOTH * 2

    publish_dataset(dataset_hub, {f"arrays/{n}.jsonl": array for n in range(4)})
    listing = list_source(f"hf://datasets/{DATASET}/arrays", "text", access)
    with pytest.raises(BrokenText, match=r"one array of objects in a file whose name ends in \.j"):
        texts_of(listing, access)


def test_the_default_train_files_are_those_of_datasets(dataset_hub, access):
    config = "- config_name: a\n  default: true\n  data_files: data/train-1.parquet\n"
    card = f"---\nconfigs:\n{config}---\n"
    publish_dataset(dataset_hub, {"README.md": card.encode(), "data/test.parquet": parquet_of()})
    listing = list_source(DATASET, "text", access)
    assert [file.name for file in listing.files] == ["data/train-1.parquet"]
    assert listing.revision == dataset_hub.repo(f"datasets/{DATASET}").head
    before = len(dataset_hub.requests)
    assert list_source(DATASET, "text", access, listing.revision) == listing
    assert len(dataset_hub.requests) == before


@pytest.mark.parametrize("folder", ["", "/", "/data", "/data/"])
def test_only_the_data_of_a_hub_folder_is_read(dataset_hub, access, folder):
    others = ("README.md", ".gitattributes", "data/README.md", "data/.cache/0.jsonl", "_old/a.json")
    publish_dataset(dataset_hub, dict.fromkeys(others, b"of another format"))
    listing = list_source(f"hf://datasets/{DATASET}{folder}", "text", access)
    assert [file.name for file in listing.files] == ["data/train-0.parquet", "data/train-1.parquet"]


def test_a_run_reads_the_commit_that_it_began_with(dataset_hub, access, tmp_path):
    first = list_source(FILES, "text", access)
    publish_dataset(dataset_hub, {"data/train-0.parquet": parquet_of(TEXTS[::-1])})
    newest = list_source(FILES, "text", access)
    pinned = FILES.replace(DATASET, f"{DATASET}@{first.revision}")
    with closing(Access(tmp_path / "another cache")) as another:
        again = list_source(FILES, "text", another, first.revision)
        named = list_source(pinned, "text", another)
        assert texts_of(again, another) == BOTH

    before = len(dataset_hub.requests)
    assert list_source(FILES, "text", access, first.revision) == first
    assert len(dataset_hub.requests) == before
    assert named.fingerprint == again.fingerprint == first.fingerprint != newest.fingerprint
    assert texts_of(newest, access) != BOTH


def test_a_named_split_is_listed_at_the_same_commit(dataset_hub, access):
    files = {"data/validation-0.parquet": parquet_of(["held out"])}
    commit = publish_dataset(dataset_hub, files)
    publish_dataset(dataset_hub, {"data/validation-1.parquet": parquet_of(["later"])})
    train = list_source(DATASET, "text", access, commit)
    held_out = list_source(DATASET, "text", access, commit, split="validation")
    assert held_out.revision == train.revision == commit
    assert texts_of(train, access) == BOTH
    assert texts_of(held_out, access) == ["held out\n"]
    with pytest.raises(DataError, match=r"no split 'test'. Its splits: train, validation\. Set"):
        list_source(DATASET, "text", access, split="test")
    with pytest.raises(DataError, match=r"data\.held_out_split=test applies only to a data set of"):
        list_source(FILES, "text", access, split="test")
    publish_dataset(dataset_hub, {"test.csv": b"text\na\n"}, "me/other")
    with pytest.raises(DataError, match=r"no split 'train'.* Its splits: test\."):
        list_source("me/other", "text", access)


def test_options_of_a_card_are_refused_with_the_name_of_a_copy(text_of, publish):
    config = "- config_name: default\n  data_files: '*.csv'\n  sep: ';'\n"
    published = publish({"train.csv": "n;text\n1;NA\n", "README.md": f"---\nconfigs:\n{config}---"})
    copy = r"data\.source=hf://datasets/\S+@refs/convert/parquet/default/train/"
    with pytest.raises(DataError, match=rf"its card reads the files with sep=';'\. .*{copy}"):
        text_of(published)


# Faults of the network and of the server.


@pytest.mark.parametrize("endpoint", ["resolve-get", "blob-get"])
@pytest.mark.parametrize("fault", ["refuse", "hang", "truncated", 503, 408, 429])
def test_a_request_that_fails_is_tried_again(dataset_hub, access, endpoint, fault):
    listing = list_source(FILES, "text", access)
    kind, details = ("status", {"status": fault}) if isinstance(fault, int) else (fault, {})
    dataset_hub.fault(endpoint, kind, after=1, times=3, **details)
    assert texts_of(listing, access) == BOTH


def test_a_start_waits_for_a_rate_limit_or_says_its_length(dataset_hub, access, monkeypatch):
    monkeypatch.setattr(waiting, "START_SECONDS", 0.1)
    limit = {"status": 429, "headers": {"RateLimit": '"api";r=0;t=1'}}
    for source, after in ((FILES, 0), (DATASET, 1)):  # then `datasets` asks the Hub
        dataset_hub.fault("info", "status", after=after, **limit)
        before = time.monotonic()
        assert list_source(source, "text", access).groups
        assert time.monotonic() - before >= 1

    limit["headers"] = {"Retry-After": "3000"}
    dataset_hub.fault("*", "status", times=None, **limit)
    with pytest.raises(TextUnreachable, match=r"HTTP 429.* a delay of 3,000 s.* 330 s") as error:
        list_source(f"{FILES}/*", "text", access)
    assert "Check the network" not in str(error.value)


def test_a_run_waits_for_a_server_that_is_down(dataset_hub, access, monkeypatch):
    monkeypatch.setattr(waiting, "SHOWN_AFTER_SECONDS", 0.2)
    shown = threading.Event()
    listing = list_source(FILES, "text", access)
    access.lines.clear()  # on a busy machine the listing says that it takes long
    access.say = lambda line: (access.lines.append(line), shown.set())
    dataset_hub.down()
    found = []
    reader = threading.Thread(target=lambda: found.append(texts_of(listing, access)))
    reader.start()
    assert shown.wait(60)
    dataset_hub.up()
    reader.join(60)

    assert found == [BOTH]
    (line,) = access.lines  # the next after a minute
    assert line.startswith(f"waiting for data.source={FILES}, ")


def test_a_wait_ends_when_the_run_does(dataset_hub, access, monkeypatch):
    monkeypatch.setattr(waiting, "SHOWN_AFTER_SECONDS", 0)
    listing = list_source(FILES, "text", access)
    waits, ended = threading.Event(), threading.Event()
    access.say = lambda line: waits.set()

    def read():
        with pytest.raises(TextUnreachable, match="ended"):
            read_group(listing, listing.groups[0], access)
        ended.set()

    delay = {"Retry-After": "99"}
    dataset_hub.fault("resolve-get", "status", status=429, times=None, headers=delay)
    threading.Thread(target=read, daemon=True).start()
    assert waits.wait(60)
    access.close()
    assert ended.wait(20)


def test_neither_a_start_nor_a_run_waits_for_ever(dataset_hub, access, monkeypatch):
    monkeypatch.setattr(waiting, "START_SECONDS", 0.3)
    listing = list_source(FILES, "text", access)
    dataset_hub.down()
    sentence = r"data\.source=hf://.* cannot be reached: .*start again"
    with access.at_start(), pytest.raises(TextUnreachable, match=sentence):
        list_source(f"{FILES}/*", "text", access)
    monkeypatch.setattr(access, "_most_seconds", 0.3)
    with pytest.raises(TextUnreachable, match=sentence):
        read_group(listing, listing.groups[0], access, skip_broken=True)


@pytest.mark.parametrize("endpoint", ["info", "tree", "resolve-get"])
@pytest.mark.parametrize(
    ("status", "reason"), [(401, "hf auth login"), (403, "hf auth login"), (404, "does not exist")]
)
def test_an_answer_that_is_final_ends_the_run_with_the_remedy(
    dataset_hub, access, endpoint, status, reason
):
    listing = list_source(FILES, "text", access)
    dataset_hub.fault(endpoint, "status", status=status, times=None)
    is_range = endpoint == "resolve-get"
    read = partial(read_group, listing, listing.groups[0], access, skip_broken=True)
    with pytest.raises(DataError, match=rf"(?=.*HTTP {status}).*{reason}") as caught:
        read() if is_range else list_source(f"{FILES}/*", "text", access)
    assert type(caught.value) is DataError  # no restart would help
    assert dataset_hub.default_token not in str(caught.value)


def test_a_token_that_was_renewed_is_read_anew(dataset_hub, access, monkeypatch):
    listing = list_source(FILES, "text", access)
    dataset_hub.revoke(dataset_hub.default_token)
    with pytest.raises(DataError, match="HTTP 401"):
        read_group(listing, listing.groups[0], access)
    monkeypatch.setenv("HF_TOKEN", dataset_hub.add_token(SECRET, role="read"))
    assert texts_of(listing, access) == BOTH
    assert not any(SECRET in line for line in access.lines)


def test_hf_hub_offline_is_respected(dataset_hub, access, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="HF_HUB_OFFLINE is set"):
        list_source(FILES, "text", access)
    assert dataset_hub.requests == []


# Texts that are prepared.


def test_a_later_start_requests_the_commit_and_what_has_changed(text_of, publish, dataset_hub):
    name = publish({"train1.txt": TEXT, "train2.txt": "before", "test.txt": "never"})
    assert text_of(name) == f"{TEXT}\nbefore\n"
    before = len(dataset_hub.requests)
    text_of(name)
    assert requests_of(dataset_hub, before) == ["info"]

    before = len(dataset_hub.requests)
    assert text_of(publish({"train2.txt": "after"})) == f"{TEXT}\nafter\n"
    assert requests_of(dataset_hub, before).count("resolve-get") == 1


def test_a_start_without_the_hub_reads_an_earlier_download(
    text_of, publish, dataset_hub, tmp_path, monkeypatch
):
    monkeypatch.setattr(waiting, "START_SECONDS", 0.1)
    name = publish({"train.txt": TEXT})
    text_of(name)
    dataset_hub.down()
    said = []

    assert text_of(name, say=said.append) == TEXT
    assert any(f"warning: {name} is read as at an earlier start: " in line for line in said)
    for record in (tmp_path / "cache/hub").iterdir():
        record.write_bytes(b"damaged")
    with pytest.raises(TextUnreachable, match=f"data.source={name} cannot be reached"):
        text_of(name)


def test_a_disk_that_is_full_is_named(text_of, publish, monkeypatch):
    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("data.reading.copies.os.fsync", full)
    with pytest.raises(DataError, match=r"data\.cache_dir=.*No space left.* Free some space"):
        text_of(publish({"train.txt": TEXT}))


@pytest.mark.parametrize("file", ["train.txt", "train.csv"])
def test_a_text_has_one_fingerprint_wherever_it_comes_from(
    publish, dataset_hub, tmp_path, monkeypatch, file
):
    content = TEXT if file == "train.txt" else "n,text\n1,NA\n2,007\n3,a sentence\n"
    (tmp_path / file).write_text(content, newline="")
    name = publish({file: content})

    def fingerprint(source, cache):
        return texts.prepare(source, tmp_path / cache, block_size=4).info.fingerprint

    there = fingerprint(name, "cache")
    dataset_hub.down()
    monkeypatch.setattr(waiting, "START_SECONDS", 0.1)
    assert fingerprint(name, "cache") == there == fingerprint(str(tmp_path / file), "another")
