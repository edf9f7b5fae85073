"""Whatever a client raises becomes a sentence of the right kind, and a safe one."""

from __future__ import annotations

import json

import httpx2
import pytest
from huggingface_hub.utils import hf_raise_for_status

from store.errors import (
    NoFile,
    NoRevision,
    StoreError,
    StoreMissing,
    StoreMoved,
    StoreRefused,
    StoreUnreachable,
    translate,
)

ADDRESS = "https://bucket.example.org/run?X-Amz-Signature=abc"
XML = (
    '<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code><Message>Request has expired</Message>'
    f"<Resource>{ADDRESS}</Resource><AWSAccessKeyId>AKIA123</AWSAccessKeyId></Error>"
)


def raised(error: Exception) -> StoreError:
    """What comes out where a client raises an error."""
    return translate(error, "me/run", "hub.repo_id=me/run", "the Hub")


def answered(status: int, body: str = "", **headers: str) -> StoreError:
    """What comes out where the server answers so. `headers` have _ for -."""
    request = httpx2.Request("GET", "https://hub.example.org/api/models/me/run/revision/main")
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    with pytest.raises(httpx2.HTTPError) as caught:
        hf_raise_for_status(httpx2.Response(status, headers=named, content=body, request=request))
    return raised(caught.value)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        *[(status, "", StoreRefused) for status in (400, 402, 403, 405, 413, 422, 501)],
        *[(status, "", StoreUnreachable) for status in (408, 409, 425, 429, 500, 502, 503)],
        (404, "RepoNotFound", StoreMissing),
        (404, "RevisionNotFound", NoRevision),
        (404, "EntryNotFound", NoFile),
        (404, "", NoFile),  # of the storage behind the Hub
        (412, "", StoreMoved),
    ],
)
def test_a_status_says_whether_another_try_can_help(status, code, kind):
    error = answered(status, "{}", **({"X_Error_Code": code} if code else {}))
    assert type(error) is kind
    assert error.short == f"HTTP {status}"
    assert str(error).count("HTTP") <= 1


def test_a_server_that_says_only_the_number_is_quoted_once():
    for said in ("", "{}", json.dumps({"error": "HTTP 403"})):
        assert str(answered(403, said, X_Error_Message="HTTP 403")).count("403") == 1
    assert "(HTTP 403: quota)" in str(answered(403, "", X_Error_Message="quota"))


@pytest.mark.parametrize("kind", ["application/xml", "text/plain"])
def test_of_an_object_storage_s_xml_only_its_reason_is_shown(kind):
    said = str(answered(403, XML, Content_Type=kind))
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
    for error in (
        answered(403, "", X_Error_Message="quota \x1b]0;owned\x07"),
        answered(503, json.dumps({"error": "\x1b[2J"})),
        raised(httpx2.RemoteProtocolError("bad line '\x1b[31m'")),
        raised(RuntimeError("\x1b[31m")),
        StoreRefused("\x1b[2J"),
    ):
        assert str(error).isprintable(), ascii(str(error))
        assert "x1b" in str(error)
