"""What an error of each client means, and the loop that repeats requests."""

from __future__ import annotations

import errno
import json

import httpx2
import pytest
from huggingface_hub.errors import (
    FileMetadataError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)

from common import retries
from common.failures import NO_ANSWER, Refused, Unanswered, failure_of
from common.retries import with_retries


def answered(status: int, kind: type = httpx2.HTTPStatusError, **headers: str) -> Exception:
    request = httpx2.Request("GET", "https://example.org/a?token=secret")
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    response = httpx2.Response(status, headers=named, request=request)
    if kind is HfHubHTTPError:
        return HfHubHTTPError("no", response=response)
    return httpx2.HTTPStatusError("no", request=request, response=response)


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


class NoCredentialsError(Exception):
    """As botocore has it."""


XET = "Request error: HTTP status client error ({} Some) for url (https://example.org/x)"
LASTS, PASSES = False, True


@pytest.mark.parametrize(
    ("error", "may_pass", "short", "retry_after"),
    [
        (answered(404), LASTS, "HTTP 404", None),
        (answered(501), LASTS, "HTTP 501", None),
        (answered(503), PASSES, "HTTP 503", None),
        (answered(429, retry_after="7"), PASSES, "HTTP 429", 7.0),
        (answered(429, retry_after="soon"), PASSES, "HTTP 429", None),
        (answered(429, HfHubHTTPError, ratelimit='"api";r=0;t=9'), PASSES, "HTTP 429", 9.0),
        (answered(429, ratelimit='"api";r=3;t=9', retry_after="2"), PASSES, "HTTP 429", 2.0),
        (caused(RuntimeError("wraps"), answered(403, HfHubHTTPError)), LASTS, "HTTP 403", None),
        (RuntimeError(XET.format(403)), LASTS, "HTTP 403", None),
        (RuntimeError(XET.format(401)), PASSES, "HTTP 401", None),
        (answered(401), LASTS, "HTTP 401", None),
        (httpx2.ReadTimeout("slow"), PASSES, "no answer in time", None),
        (TimeoutError(), PASSES, "no answer in time", None),
        (httpx2.ConnectError("refused"), PASSES, "ConnectError", None),
        (httpx2.TooManyRedirects("20"), LASTS, "TooManyRedirects", None),
        (json.JSONDecodeError("Expecting value", "<html>", 0), PASSES, "not JSON", None),
        (
            caused(LocalEntryNotFoundError("none"), ConnectionError()),
            PASSES,
            "ConnectionError",
            None,
        ),
        (caused(LocalEntryNotFoundError("none"), ValueError()), LASTS, "ValueError", None),
        (HFValidationError("Repo id must be in the form"), LASTS, "HFValidationError", None),
        (FileMetadataError("X-Repo-Commit is missing"), LASTS, "FileMetadataError", None),
        (KeyError("pointerSize"), LASTS, "KeyError", None),
        (LocalTokenNotFoundError("none"), LASTS, "LocalTokenNotFoundError", None),
        (OfflineModeIsEnabled("set"), LASTS, "OfflineModeIsEnabled", None),
        (OSError(errno.EIO, "broken"), PASSES, "OSError", None),
        (OSError(errno.ENOSPC, "full"), LASTS, "OSError", None),
        (caused(PermissionError("no"), Exception("of a library")), LASTS, "PermissionError", None),
        (FileNotFoundError("none"), LASTS, "FileNotFoundError", None),
        (ImportError("s3fs"), LASTS, "ImportError", None),
        (Exception("of a library"), PASSES, "Exception", None),
        (NoCredentialsError("none"), LASTS, "NoCredentialsError", None),
        (caused(RuntimeError("wraps"), Unanswered("later", "later", 3.0)), PASSES, "later", 3.0),
    ],
    ids=lambda value: f"{type(value).__name__}: {value}"[:60],
)
def test_one_table_says_what_an_error_means(error, may_pass, short, retry_after):
    failure = failure_of(error)
    found = (failure.may_pass, failure.short, failure.retry_after)
    assert found == (may_pass, short, retry_after)
    assert "secret" not in str(failure)


def repeated(monkeypatch, *failures: Exception) -> tuple[object, list[float]]:
    """What comes of a request with these failures, and the delays between its tries."""
    delays: list[float] = []
    monkeypatch.setattr(retries.time, "sleep", delays.append)
    left = list(failures)

    def request() -> str:
        if left:
            raise left.pop(0)
        return "an answer"

    try:
        return with_retries(request), delays
    except (Refused, Unanswered, KeyError) as error:
        return error, delays


def test_a_failure_that_may_pass_is_repeated_briefly_and_no_other(monkeypatch):
    later, silent = Unanswered("later"), Unanswered("silent", NO_ANSWER)
    assert repeated(monkeypatch, later, later, later) == ("an answer", [0.5, 1.0, 2.0])
    assert repeated(monkeypatch, *4 * [later]) == (later, [0.5, 1.0, 2.0])
    assert repeated(monkeypatch, Unanswered("soon", retry_after=9.0)) == ("an answer", [9.0])
    for lasting in (Refused("no"), silent, Unanswered("full", retry_after=11.0), KeyError("ours")):
        assert repeated(monkeypatch, lasting) == (lasting, [])


def test_a_delay_that_doubles_or_is_asked_for_has_a_bound():
    left, delays = [Unanswered("an age", retry_after=1e9), *9 * [Unanswered("later")]], []

    def request() -> None:
        if left:
            raise left.pop(0)

    with_retries(request, lambda failure, waited, delay: delays.append(delay))
    assert delays == [3600.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
