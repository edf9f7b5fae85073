"""An address never leaves the machine with its secrets."""

from __future__ import annotations

import pytest

from data.address import without_secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://h/x.txt?token=abc", "https://h/x.txt?***"),
        ("https://u:p@h:80/x", "https://h:80/x"),
        ("HTTPS://u:p@ss@h?t=1#u:p@k", "HTTPS://h?***"),
        ("https://h/x#access_token=1", "https://h/x#***"),
        ("https://h/x?to=https://u:p@k/y?z=1", "https://h/x?***"),
        (
            "data.source=https://h/x?t=1&s=2 is not there: no.",
            "data.source=https://h/x?*** is not there: no.",
        ),
        ("See ('https://h/x?t=a.b').", "See ('https://h/x?***')."),
        ("s3://h/a?b ftp://u@h/c", "s3://h/a?*** ftp://h/c"),
    ],
)
def test_users_passwords_and_queries_are_removed(text, shown):
    assert without_secrets(text) == shown
    assert without_secrets(shown) == shown


@pytest.mark.parametrize(
    "text", ["https://h/a@b/c.txt", "books/*.tx?", "git@h:x/y", "a@b.c: why?yes", "owner/name@main"]
)
def test_what_holds_no_secret_is_left_alone(text):
    assert without_secrets(text) == text
