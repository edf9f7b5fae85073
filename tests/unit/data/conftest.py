"""What the tests of texts share."""

from __future__ import annotations

import pytest

import texts


@pytest.fixture
def prepare(tmp_path):
    """Prepares a text in a folder of this test."""

    def prepare(source, cache="cache", **changes):
        return texts.prepare(source, tmp_path / cache, **changes)

    return prepare
