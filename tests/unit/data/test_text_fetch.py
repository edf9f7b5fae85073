"""Texts behind an address: whole or not there, whoever else fetches them at the same time."""

from __future__ import annotations

import gzip
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import texts
from data.errors import DataError, TextUnreachable
from data.reading.access import Access
from data.reading.rows import list_source, read_group
from loopback_texts import serving
from texts import prepare

TEXT = texts.TEXT.encode()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr("common.retries.FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr("data.reading.access.START_SECONDS", 0.1)
    monkeypatch.setattr("data.reading.access.START_RATE_LIMIT_SECONDS", 0.1)


@pytest.fixture
def served():
    """A server of one answer a path: (status, headers, the pieces of the body, each a moment)."""
    answers = {}
    with serving(answers.__getitem__) as (address, asked):
        yield address, answers, asked


def of_length(*pieces):
    return {"Content-Length": str(sum(len(piece) for piece in pieces if isinstance(piece, bytes)))}


def files_in(cache):
    return [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_processes_that_share_a_folder_fetch_a_text_once(served, tmp_path):
    address, answers, asked = served
    begun = threading.Event()
    answers["/a.txt"] = (200, of_length(TEXT), [TEXT[:6000], begun.set, TEXT[6000:]])
    with ThreadPoolExecutor() as pool:
        first = pool.submit(prepare, f"{address}/a.txt", tmp_path)
        assert begun.wait(60)
        corpora = [prepare(f"{address}/a.txt", tmp_path), first.result()]

    assert [texts.text_of(corpus) for corpus in corpora] == [texts.TEXT] * 2
    assert len(asked) == 1


def test_a_stream_of_a_url_is_downloaded_too(served, tmp_path):
    """A server may send no ranges of bytes."""
    address, answers, asked = served
    rows = b'{"text": "a"}\n' * 9
    answers["/a.jsonl?token=secret"] = (200, of_length(rows), [rows])
    access = Access(tmp_path)
    listing = list_source(f"{address}/a.jsonl?token=secret", "text", access)
    assert listing.name == f"{address}/a.jsonl?***"
    assert read_group(listing, listing.groups[0], access) == ["a\n"] * 9
    assert len(asked) == 1


PAGE = b"<!DOCTYPE html>\n<html><body>Log in first</body></html>"
BAD = {
    "empty": ({"Content-Length": "0"}, [], "the response is empty"),
    "a page": ({"Content-Type": "text/html", **of_length(PAGE)}, [PAGE], "a web page"),
    "too short": (of_length(TEXT), [TEXT[:-1]], f"{len(TEXT) - 1} bytes, expected {len(TEXT)}"),
    "a chunk too few": (
        {"Transfer-Encoding": "chunked"},
        [b"5\r\nfirst\r\n"],
        "cannot be reached",
    ),
}


@pytest.mark.parametrize("answer", BAD)
def test_a_bad_download_is_told_and_not_kept(served, tmp_path, answer):
    address, answers, _ = served
    headers, pieces, reason = BAD[answer]
    url = f"{address}/a.txt"
    answers["/a.txt"] = (200, headers, pieces)

    with pytest.raises(DataError, match=reason) as caught:
        prepare(url, tmp_path)
    assert f"data.source={url}" in str(caught.value)
    assert files_in(tmp_path) == []

    answers["/a.txt"] = (200, of_length(TEXT), [TEXT])
    assert prepare(url, tmp_path).info.characters == len(TEXT.decode())


def test_an_unreadable_download_is_named_with_its_copy(served, tmp_path):
    """What else is said of each kind: test_sources.py, test_row_errors.py."""
    address, answers, _ = served
    answers["/a.txt"] = (200, of_length(b"caf\xe9"), [b"caf\xe9"])

    with pytest.raises(DataError, match="byte 0xe9") as caught:
        prepare(f"{address}/a.txt", tmp_path)
    (copy,) = files_in(tmp_path)
    assert f"It was downloaded to {copy}: remove that to download it again." in str(caught.value)


def test_a_gzip_file_may_be_called_what_it_is(served, tmp_path):
    address, answers, asked = served
    packed = gzip.compress(TEXT)
    headers = {"Content-Encoding": "x-gzip", **of_length(packed)}  # as Apache says of each .gz
    answers["/a.txt.gz"] = (200, headers, [packed])

    assert prepare(f"{address}/a.txt.gz", tmp_path).info.characters == len(TEXT.decode())
    assert asked[0][1]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://[::1", "is not a valid URL"),
        ("http://127.0.0.1:port/a.txt", "is not a valid URL: Invalid port: 'port'"),
        ("http://", "has no host"),
        ("https:///a.txt", "has no host"),
        ("HTTP://127.0.0.1:1/" + "x" * 300 + ".txt", "cannot be reached"),
        ("nothing://127.0.0.1/a.txt", "Protocol not known"),
    ],
)
def test_an_address_that_cannot_be_fetched_is_told(tmp_path, url, reason):
    with pytest.raises(DataError, match=reason) as caught:
        prepare(url, tmp_path)
    assert str(caught.value).startswith(f"data.source={url}")
    assert isinstance(caught.value, TextUnreachable) == (reason == "cannot be reached")


@pytest.mark.parametrize("name", ["日 本.txt", "x" * 300 + ".txt.gz", "%2e%2e", ""])
def test_any_name_of_an_address_can_be_kept(served, tmp_path, name):
    address, answers, asked = served
    content = gzip.compress(TEXT) if name.endswith("gz") else TEXT
    for path in ("/%E6%97%A5%20%E6%9C%AC.txt", f"/{name}", "/"):  # dot segments are removed
        answers[path] = (200, of_length(content), [content])

    assert prepare(f"{address}/{name}", tmp_path).info.characters == len(TEXT.decode())
    assert len(asked) == 1
    (kept,) = [path for path in files_in(tmp_path) if "fetched" in path.parts]
    assert kept.read_bytes() == content
    assert kept.is_relative_to(tmp_path / "fetched")


def test_a_token_of_an_address_is_in_no_error(tmp_path, served):
    """Nor anywhere else: test_address.py."""
    address, answers, _ = served
    answers["/none.txt?token=secret"] = (404, {}, [])
    with pytest.raises(DataError) as caught:
        prepare(f"{address}/none.txt?token=secret", tmp_path)
    assert f"data.source={address}/none.txt?*** does not exist (HTTP 404)" in str(caught.value)


@pytest.mark.parametrize("user", ["me:secret@", "me:secret:or@", "secret@"])
def test_a_password_in_an_address_is_neither_sent_nor_shown(tmp_path, served, user):
    address, _, asked = served
    with pytest.raises(DataError, match="a user name or password before it, which is") as caught:
        prepare(address.replace("//", f"//{user}") + "/a.txt", tmp_path)
    assert asked == []
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_fails_is_no_mistake_in_the_address(served, tmp_path, status):
    address, answers, _ = served
    answers["/a.txt"] = (status, {**of_length(), "Retry-After": "1e400"}, [])
    with pytest.raises(TextUnreachable) as caught:
        prepare(f"{address}/a.txt", tmp_path)
    assert "a delay of" not in str(caught.value)  # of 1e400 seconds
