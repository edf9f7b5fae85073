"""Token files: whole or refused, read in windows, and cut short without harm to the process."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import TextLost
from data.token_file import TokenFile, TokenRows, write_tokens

PARTS = st.lists(
    st.lists(st.lists(st.integers(0, 255), max_size=5), max_size=4), min_size=1, max_size=5
)


def rows_of(documents: list[list[int]]) -> TokenRows:
    """Documents of which the last one goes on, and every second token is a target."""
    tokens = np.array([token for document in documents for token in document], dtype=np.uint8)
    targets = np.arange(len(tokens) // 2 * 2)
    return TokenRows(tokens, np.cumsum([len(one) for one in documents[:-1]], dtype=int), targets)


@settings(deadline=None, max_examples=50)
@given(PARTS, st.integers(0, 60), st.integers(0, 60))
def test_what_is_written_is_read_in_any_window(tmp_path_factory, parts, start, length):
    path = tmp_path_factory.mktemp("file") / "a"
    rows = [rows_of(part) for part in parts]
    write_tokens(path, iter(rows), np.dtype(np.uint8), {"who": "me"})
    file, tokens = TokenFile(path), [token for part in rows for token in part.tokens.tolist()]
    assert (len(file), file.facts) == (len(tokens), {"who": "me"})
    assert file[start : start + length].tolist() == tokens[start : start + length]
    begins = np.cumsum([0, *(len(part.tokens) for part in rows)])
    for name in ("ends", "targets"):
        expected = [getattr(part, name) + at for part, at in zip(rows, begins, strict=False)]
        assert getattr(file, name).tolist() == np.concatenate(expected).tolist()


@pytest.fixture
def path(tmp_path) -> Path:
    rows = TokenRows(np.arange(60_000, dtype=np.uint16), np.array([60_000]))
    write_tokens(tmp_path / "a", [rows], rows.tokens.dtype)
    return tmp_path / "a"


@pytest.mark.parametrize("size", [0, 7, 8, 100, 119_999, -1])
def test_a_file_that_is_not_whole_is_refused(path, size):
    os.truncate(path, size if size >= 0 else path.stat().st_size - 1)
    with pytest.raises(ValueError, match="is damaged"):
        TokenFile(path)


def test_a_file_that_shrinks_ends_a_read_and_not_the_process(path):
    file = TokenFile(path)
    assert str(path) not in Path("/proc/self/maps").read_text()
    os.truncate(path, 50_000)
    assert file[:1000].tolist() == list(range(1000))
    with pytest.raises(TextLost, match="became shorter while it was read"):
        file[59_000:60_000]
