"""Whatever the Hub client raises becomes a sentence of the right kind, and a safe one."""

from __future__ import annotations

import json

import httpx2
import pytest
from huggingface_hub.errors import FileMetadataError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import hf_raise_for_status

from store.errors import (
    NoRevision,
    StoreMissing,
    StoreRefused,
    StoreUnreachable,
    Unsupported,
    translate_errors,
)

ADDRESS = "https://bucket.example.org/run?X-Amz-Signature=abc"
XML = (
    '<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code><Message>Request has expired</Message>'
    f"<Resource>{ADDRESS}</Resource><AWSAccessKeyId>AKIA123</AWSAccessKeyId></Error>"
)


def raised(error: Exception, **more) -> Exception:
    """What comes out where the client raises an error."""
    with (
        pytest.raises(Exception) as caught,  # noqa: PT011
        translate_errors("me/run", more.pop("at", "main"), **more),
    ):
        raise error
    return caught.value


def answered(status: int, body: str = "", headers: dict | None = None, **more) -> Exception:
    """What comes out where the server answers so."""
    request = httpx2.Request("GET", "https://hub.example.org/api/models/me/run/revision/main")
    with pytest.raises(httpx2.HTTPError) as caught:
        hf_raise_for_status(httpx2.Response(status, headers=headers, content=body, request=request))
    return raised(caught.value, **more)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("`parent_commit` is not a valid commit OID"),
        HFValidationError("Repo id must be in the form 'namespace/name'"),
        KeyError("pointerSize"),
        TypeError("'NoneType' object is not iterable"),
        FileMetadataError("Header 'X-Repo-Commit' is missing"),
        UnicodeEncodeError("ascii", "ü", 0, 1, "ordinal not in range"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_the_client_itself_refuses_is_no_outage(error):
    assert isinstance(raised(error), StoreRefused)
    wrapped = LocalEntryNotFoundError("An error happened while trying to locate the file")
    wrapped.__cause__ = error
    assert isinstance(raised(wrapped), StoreRefused)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("refused"),
        httpx2.ConnectError("refused"),
        httpx2.ReadTimeout("slow"),
        RuntimeError("a panic"),
        json.JSONDecodeError("Expecting value", "<html>", 0),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_may_pass_is_an_outage(error):
    assert isinstance(raised(error), StoreUnreachable)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, StoreRefused),
        (402, StoreRefused),
        (403, StoreRefused),
        (413, StoreRefused),
        (422, StoreRefused),
    ]
    + [(404, Unsupported), (405, Unsupported), (501, Unsupported)]
    + [(status, StoreUnreachable) for status in (408, 409, 425, 429, 500, 502, 503, 504)],
)
def test_a_status_says_whether_another_try_can_help(status, kind):
    error = answered(status, "{}")
    assert type(error) is kind
    assert error.short == f"HTTP {status}"
    assert str(error).count("HTTP") == 1  # it is not said twice


@pytest.mark.parametrize("status", [401, 403, 503])
def test_a_server_that_says_only_the_number_is_quoted_once(status):
    number = f"HTTP {status}"
    for said in ("", "{}", json.dumps({"error": number})):
        error = answered(status, said, {"X-Error-Message": number, "X-Error-Code": "Other"})
        assert str(error).count(str(status)) == 1
    assert "(HTTP 403: quota)" in str(answered(403, "", {"X-Error-Message": "quota"}))


def test_404_without_an_error_code_means_what_was_asked_for():
    assert type(answered(404, "{}")) is Unsupported
    assert type(answered(404, "{}", not_found=StoreMissing)) is StoreMissing
    assert type(answered(404, "{}", not_found=NoRevision)) is NoRevision
    with_code = answered(404, "{}", {"X-Error-Code": "EntryNotFound"}, not_found=StoreMissing)
    assert type(with_code) is Unsupported


def test_a_revision_that_is_not_there_may_have_been_squashed_away():
    error = answered(404, "", {"X-Error-Code": "RevisionNotFound"}, at="8b5d64c")
    assert type(error) is NoRevision
    assert "no revision 8b5d64c: no branch, tag or commit" in str(error)
    assert "or a squash has removed the commit" in str(error)


@pytest.mark.parametrize("kind", ["application/xml", "text/plain"])
def test_of_an_object_storage_s_xml_only_its_reason_is_shown(kind):
    said = str(answered(403, XML, {"Content-Type": kind}))
    assert "(HTTP 403: AccessDenied: Request has expired)" in said
    for part in ("<", "AKIA", "Signature", "bucket"):
        assert part not in said
    assert "Signature" not in str(raised(httpx2.ConnectError(f"no way to {ADDRESS}")))


def test_an_address_is_shown_without_its_password_and_signature():
    address = "https://jane:word@example.org/a/b?X-Amz-Signature=abc&token=hf_secret#frag"
    for error in (httpx2.ConnectError(f"no way to {address}."), ValueError(f"'{address}'")):
        said = str(raised(error))
        assert "https://example.org/a/b?***" in said
        for secret in ("jane", "word", "abc", "hf_secret", "frag"):
            assert secret not in said


def test_nothing_that_a_server_says_acts_on_the_terminal():
    headers = {"X-Error-Message": "quota \x1b]0;owned\x07"}
    for error in (
        answered(403, "", headers),
        answered(503, json.dumps({"error": "\x1b[2J"})),
        raised(httpx2.RemoteProtocolError("bad line '\x1b[31m'")),
        raised(RuntimeError("\x1b[31m")),
        StoreRefused("\x1b[2J"),
    ):
        assert str(error).isprintable(), ascii(str(error))
        assert "x1b" in str(error)
