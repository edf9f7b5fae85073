"""What a proof finds in a text: repeated rows, misplaced targets, replies that do not end."""

from __future__ import annotations

import numpy as np
import pytest

from model.head import IGNORED
from proving.text import digests, misplaced, unended

TOKENS = np.random.default_rng(0).integers(0, 50, 400)


@pytest.mark.parametrize("width", [1, 8, 64])
def test_digests_are_equal_where_the_tokens_are(width):
    found = digests(np.concatenate([TOKENS, TOKENS[100:300]]), width)
    assert len(found) == 600 - width + 1
    assert np.array_equal(found[400 : 600 - width], found[100 : 300 - width])
    rows = {tuple(TOKENS[i : i + width]) for i in range(400 - width + 1)}
    assert len(set(found[: 400 - width + 1].tolist())) == len(rows)


def test_targets_are_the_tokens_that_follow():
    assert misplaced([1, 2, 3, 4], [2, 3, 4, 5]) == 0
    assert misplaced([1, 2, 3, 4], [IGNORED, 3, IGNORED, 5]) == 0
    assert misplaced([1, 2, 3, 4], [1, 2, 3, 4]) == 3


def test_a_reply_is_trained_on_to_its_end():
    end = 9
    assert unended([2, 3, end, IGNORED, IGNORED], frozenset({end})) == 0
    assert unended([2, 3, IGNORED, IGNORED, IGNORED], frozenset({end})) == 1
    assert unended([2, 3, IGNORED, IGNORED, IGNORED], frozenset()) == 0  # a text
