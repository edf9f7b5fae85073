"""An address never leaves the machine with its secrets."""

from __future__ import annotations

import pytest

import hubs
import runs
from common.printable import redact_urls
from loopback_texts import serving


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
    assert redact_urls(text) == shown
    assert redact_urls(shown) == shown


@pytest.mark.parametrize(
    "text", ["https://h/a@b/c.txt", "books/*.tx?", "git@h:x/y", "a@b.c: why?yes", "owner/name@main"]
)
def test_what_holds_no_secret_is_left_alone(text):
    assert redact_urls(text) == text


def test_no_token_is_stored_shown_or_uploaded(small, tmp_path, hub, text_file):
    """A password is refused: test_text_fetch.py."""
    words = [word for word in small if not word.startswith("data.")]
    words += ["data.block_size=16", f"data.cache_dir={tmp_path / 'cache'}"]
    with serving(lambda path: (200, {}, [text_file.read_bytes()])) as (address, _):
        address += "/text.txt"
        for steps in (2, 4):
            result = runs.train(
                *words,
                *hubs.words(tmp_path / "run", f"train.max_steps={steps}"),
                f'data.source="{address}?x=1&token=mysecret{steps}"',
                **hub.environment(),
            )
            assert result.returncode == 0, result.stderr
            assert "mysecret" not in result.stdout + result.stderr
    assert f"{address}?***: " in result.stdout
    assert "changed   data.source" not in result.stdout
    assert hubs.step_of(hub) == 4
    for path in tmp_path.rglob("*"):
        assert "mysecret" not in str(path)
        assert path.is_dir() or b"mysecret" not in path.read_bytes(), path
