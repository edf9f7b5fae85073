"""The figures of docs/performance.md are those that the benchmarks have measured."""

from __future__ import annotations

import sys

from runs import ROOT

sys.path.append(str(ROOT / "benchmarks"))  # last: its data.py is not the room of that name
import page


def test_the_table_is_the_one_of_the_json_files():
    text = page.PAGE.read_text()
    assert page.with_table(text) == text, "run python benchmarks/page.py"
