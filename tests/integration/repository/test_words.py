"""The field's words: product code and the README have no private ones for what has a name."""

from __future__ import annotations

import re

import pytest

from runs import ROOT
from tracked import tracked

# The private word, and the field's.
PRIVATE = {
    r"\bbeside\b": "in the background, next to",
    r"\btogether\b": "global micro-batch, of all processes",
    r"\bpatien(ce|tly)\b": "timeout, with retries",
    r"\bclaim(s|ed|ing)?\b": "run lock",
    r"\b(survey(s|ed)?|ledgers?|pretend(s|ed)?)\b": "memory estimate, allocation log, fake tensors",
    r"\btold[ _]apart\b": "translated",
    r"\bspeaks?\b": "prints, reports",
    r"\bbelieved? in\b": "trusted",
    r"\b(goes|going|gone|go) on\b": "continues, resumes",
    r"\b[Ll]et it speak\b": "generate text",
    r"\b[Tt]rain it on\b": "continue training",
    r"\bbe_(long|short)\b": "relax, tighten",
}
SCRIPTS = ("train.py", "sample.py", "evaluate.py", "plan.py", "prove.py", "trace.py")
PATHS = [ROOT / name for name in (*SCRIPTS, "README.md")] + [
    path
    for room in (
        "cloud",
        "common",
        "config",
        "data",
        "model",
        "planning",
        "snapshot",
        "tracing",
        "training",
    )
    for path in tracked(room)
    if path.suffix in (".py", ".yaml")
]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_private_word(path):
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        for word, better in PRIVATE.items():
            assert not re.search(word, line), f"line {number}: {line.strip()} (better: {better})"
