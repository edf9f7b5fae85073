"""The figures of docs/performance.md are those that the benchmarks have measured."""

from __future__ import annotations

import json
import shutil
import sys

from runs import ROOT

sys.path.append(str(ROOT / "benchmarks"))  # last: its data.py is not the room of that name
import page


def test_the_table_is_the_one_of_the_json_files():
    text = page.PAGE.read_text()
    assert page.with_table(text) == text, "run python benchmarks/page.py"


def test_a_figure_that_was_measured_again_changes_the_page(tmp_path, monkeypatch):
    results = shutil.copytree(page.RESULTS, tmp_path / "results")
    file = results / "startup.json"
    content = json.loads(file.read_text())
    content["figures"]["import torch, accelerate"] = [12.34]
    file.write_text(json.dumps(content))
    monkeypatch.setattr(page, "RESULTS", results)
    text = page.PAGE.read_text()
    assert page.with_table(text) != text
    assert "12.3 s" in page.table()
