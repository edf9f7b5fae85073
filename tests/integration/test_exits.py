"""How a run ends: every cause has its exit code, and the documentation names a test for each."""

from __future__ import annotations

import re
import signal

import pytest

import runs
from config.schema import ConfigError
from data.errors import DataError, TextLost, TextUnreachable
from snapshot.errors import SnapshotError
from store.errors import StoreError, StoreRefused, StoreUnreachable
from training.distributed.processes import FailedElsewhere, is_lasting
from training.exits import OutOfMemory, TrainingStopped
from training.run.command import _code_for
from training.run.stopping import WORKER_GONE

PAGE = (runs.ROOT / "docs" / "resume-and-faults.md").read_text(encoding="utf-8")
LOST = RuntimeError("[gloo] Connection closed by peer")


@pytest.mark.parametrize(
    ("error", "code", "again"),
    [
        (ConfigError("a key"), 2, False),
        (DataError("a text"), 2, False),
        (SnapshotError("a snapshot"), 2, False),
        (StoreRefused("a token"), 2, False),
        (StoreError("another repo"), 2, False),
        (StoreUnreachable("no answer"), 1, True),
        (TextUnreachable("no answer"), 1, True),
        (TextLost("became shorter"), 1, True),
        (TrainingStopped("nan"), 1, False),
        (OutOfMemory("a step"), 1, True),
        (ValueError("a bug"), 1, True),
        (MemoryError(), 1, True),
        (LOST, 1, True),
        (FailedElsewhere(2, for_good=True), 2, False),
        (FailedElsewhere(1, for_good=False), 1, True),
    ],
    ids=repr,
)
def test_an_error_has_a_code_and_ends_a_run_for_good_or_not(error, code, again):
    assert _code_for(error, cause=None) == code
    assert not isinstance(error, FailedElsewhere) or error.for_good != again
    assert isinstance(error, FailedElsewhere) or is_lasting(error) != again


@pytest.mark.parametrize(
    ("cause", "error", "code"),
    [
        (signal.SIGTERM, LOST, 143),  # those that were told as well have left
        (signal.SIGINT, LOST, 130),
        (WORKER_GONE, LOST, 1),
        (signal.SIGTERM, TrainingStopped("the disk is full"), 1),
        (signal.SIGTERM, ValueError("a bug"), 1),
        (None, LOST, 1),
    ],
)
def test_the_first_cause_decides(cause, error, code):
    assert _code_for(error, cause) == code


def test_the_documentation_names_a_test_for_every_code():
    rows = re.findall(r"^\| (\d+) \| .* \| ([\w/]+): `(test_\w+)` \|$", PAGE, flags=re.MULTILINE)
    assert {int(code) for code, _, _ in rows} == {0, 1, 2, 75, 130, 143}
    for code, file, name in rows:
        text = (runs.ROOT / "tests" / f"{file}.py").read_text()
        body = text[text.index(f"def {name}(") :].partition("\ndef test_")[0]
        asserted = re.search(rf'(== |code=|"){code}\b|CODES\[', body)
        assert asserted, (code, name)
