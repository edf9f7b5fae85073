"""Whatever a client raises becomes a sentence of the right kind, and a safe one."""

from __future__ import annotations

import json

import httpx2
import pytest
from huggingface_hub.utils import hf_raise_for_status

from store.errors import (
    NoFile,
    NoRevision,
    StoreMissing,
    StoreMoved,
    StoreRefused,
    StoreUnreachable,
    translate,
)

ADDRESS = "https://jane:word@example.org/a/b?X-Amz-Signature=abc&token=hf_secret#frag"
TOKEN = "api_org_secret"
"""An organization token in the old format, without `hf_`."""
XML = (
    '<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code><Message>Request has expired</Message>'
    f"<Resource>{ADDRESS}</Resource><AWSAccessKeyId>AKIA123</AWSAccessKeyId></Error>"
)


def answered(status: int, body: str = "", **headers: str) -> Exception:
    """What the client raises where the server answers so. `headers` have _ for -."""
    request = httpx2.Request("GET", "https://hub.example.org/api/models/me/run/revision/main")
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    with pytest.raises(httpx2.HTTPError) as caught:
        hf_raise_for_status(httpx2.Response(status, headers=named, content=body, request=request))
    return caught.value


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
    cause = answered(status, "{}", **({"X_Error_Code": code} if code else {}))
    error = translate(cause, "me/run", "hub.repo_id=me/run", "the Hub")
    assert type(error) is kind
    assert error.short == f"HTTP {status}"
    assert str(error).count("HTTP") <= 1


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        *[
            (answered(403, said, X_Error_Message="HTTP 403"), "the Hub refuses (HTTP 403). Check")
            for said in ("", "{}", json.dumps({"error": "HTTP 403"}))
        ],
        (answered(403, "", X_Error_Message="quota"), "(HTTP 403: quota)"),
        (answered(403, "", X_Error_Message=f"{TOKEN} may not"), "(HTTP 403: hf_*** may not)"),
        *[
            (answered(403, XML, Content_Type=kind), "(HTTP 403: AccessDenied: Request has expired)")
            for kind in ("application/xml", "text/plain")
        ],
        (httpx2.ConnectError(f"no way to {ADDRESS}."), "https://example.org/a/b?***"),
        (ValueError(f"'{ADDRESS}'"), "https://example.org/a/b?***"),
        (answered(403, "", X_Error_Message="quota \x1b]0;owned\x07"), "x1b"),
        (answered(503, json.dumps({"error": "\x1b[2J"})), "x1b"),
        (httpx2.RemoteProtocolError("bad line '\x1b[31m'"), "x1b"),
        (RuntimeError("\x1b[31m"), "x1b"),
        (StoreRefused("\x1b[2J"), "x1b"),
    ],
)
def test_a_message_has_the_reason_once_no_secret_and_no_control_character(
    error, shown, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    said = str(translate(error, "me/run", "hub.repo_id=me/run", "the Hub"))
    assert shown in said
    assert said.isprintable()
    for secret in ("<", "AKIA", "Signature", "jane", "word", "abc", "hf_secret", "frag", TOKEN):
        assert secret not in said
