"""What a proof finds in a text: repeated rows, misplaced targets, replies that do not end."""

from __future__ import annotations

import numpy as np

from model.head import IGNORED
from proving.text import LONGEST_SHOWN, marked, misplaced, rows_within, unended

TOKENS = np.random.default_rng(0).integers(0, 50, 400)


def test_rows_of_a_text_are_found_in_another():
    assert rows_within([TOKENS], TOKENS[100:300], 64) == (3, 3)
    assert rows_within([TOKENS[:200], TOKENS[330:]], TOKENS, 64) == (3, 6)
    assert rows_within([TOKENS], TOKENS[:63], 64) == (0, 0)


def test_targets_are_the_tokens_that_follow():
    assert misplaced([1, 2, 3, 4], [2, 3, 4, 5]) == 0
    assert misplaced([1, 2, 3, 4], [IGNORED, 3, IGNORED, 5]) == 0
    assert misplaced([1, 2, 3, 4], [1, 2, 3, 4]) == 3


class Letters:
    """A tokenizer whose ids are code points."""

    def decode(self, ids):
        return "".join(map(chr, ids))


def test_a_row_shows_what_the_model_learns_to_write():
    row = [ord(letter) for letter in "hi\n hello"]
    targets = [*[IGNORED] * 3, *row[4:], ord(".")]
    assert marked(Letters(), row, targets) == "hi\n »hello«"
    shown = marked(Letters(), [ord("x")] * 1000, [ord("x")] * 1000)
    assert shown == f"x»{'x' * (LONGEST_SHOWN - 2)}..."


def test_a_reply_is_trained_on_to_its_end():
    end = 9
    assert unended([2, 3, end, IGNORED, IGNORED], frozenset({end})) == 0
    assert unended([2, 3, IGNORED, IGNORED, IGNORED], frozenset({end})) == 1
