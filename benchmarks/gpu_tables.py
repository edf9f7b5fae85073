"""The results of benchmarks/gpu.py as Markdown tables for benchmarks/RESULTS.md, with targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_items import Item, Row
from harness import print_table

SHARES = ("MFU", "stall / 100 steps")
"""Columns that are printed in percent."""
RATIOS = ("train.py / this", "plan / peak")


@dataclass(frozen=True)
class Target:
    """What a figure is to reach: a column in the rows that it is about."""

    column: str
    words: str
    is_reached: Callable[[float], bool]
    concerns: Callable[[str, Row], bool]
    """By the group and the row."""


TARGETS = (
    Target(
        "MFU",
        "at least 50 %",
        lambda share: share >= 0.5,
        lambda group, row: (
            (group == "gpt2 compiled" and row["contestant"].startswith("train.py"))
            or (group == "micro-batches" and row["compiled"] != "no")
        ),
    ),
    Target(
        "train.py / this",
        "at least 1.0",
        lambda ratio: ratio >= 1.0,
        lambda group, row: group == "gpt2 compiled" and row["contestant"] == "nanoGPT",
    ),
    Target(
        "plan / peak",
        "0.95 to 1.05",
        lambda ratio: 0.95 <= ratio <= 1.05,
        lambda group, row: True,
    ),
    Target(
        "stall / 100 steps",
        "at most 1 %",
        lambda share: share <= 0.01,
        lambda group, row: True,
    ),
)


def cell(group: str, row: Row, column: str) -> str:
    """A cell as text, with the target that its figure has."""
    value = row.get(column)
    if value is None:
        return ""
    text = f"{value:,}" if isinstance(value, int) else str(value)
    if isinstance(value, float) and column in SHARES:
        text = f"{value:.1%}"
    if isinstance(value, float) and column in RATIOS:
        text = f"{value:.3f}"
    for target in TARGETS:
        if target.column == column and target.concerns(group, row):
            verdict = "reached" if target.is_reached(value) else "missed"
            text += f" ({target.words}: {verdict})"
    return text


def print_tables(items: Sequence[Item], found: dict[str, Any]) -> None:
    """Print a table for each group, and below it what failed or is missing."""
    for group in dict.fromkeys(item.group for item in items):
        members = [item for item in items if item.group == group]
        rows = [row for item in members for row in found.get(item.name, {}).get("rows", [])]
        print(f"\n### {group}\n")
        if rows:
            columns = list(dict.fromkeys(column for row in rows for column in row))
            print_table(columns, [[cell(group, row, name) for name in columns] for row in rows])
        for item in members:
            if "error" in (result := found.get(item.name, {"error": "not measured yet"})):
                print(f"\n{item.name}: {result['error'].partition(chr(10))[0]}")
