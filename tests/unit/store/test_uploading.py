"""What the end of a run says about its repo on the Hub, whatever became of the uploads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import runs
from config.compose import load_config
from config.schema import HubConfig
from store.errors import StoreError
from store.uploader import UploadStatus
from training.reporting.console import Console
from training.run.records import finish_uploads, hand_over

HTTP_503 = StoreError("the Hub answers HTTP 503: maintenance", "HTTP 503")


def said_at_the_end(tmp_path, status: UploadStatus) -> str:
    """What a run prints whose uploads stand so."""
    lines: list[str] = []
    console = SimpleNamespace(say=lines.append, warn=lambda text: lines.append(f"warning: {text}"))
    uploads = SimpleNamespace(
        pending_folders=lambda: {tmp_path} if status.failure and not status.off else set(),
        flush=lambda seconds, more: status.failure is None or status.off,
        messages=list,
        status=lambda: status,
    )
    config = SimpleNamespace(
        hub=HubConfig(repo_id="me/run", flush_seconds=1.0),
        run=SimpleNamespace(dir=str(tmp_path)),
    )
    finish_uploads(console, config, uploads, SimpleNamespace(seconds_left=lambda: 1e9))
    return lines[-1]


@pytest.mark.parametrize(
    ("status", "words", "at_the_end"),
    [
        (UploadStatus(30, 1.0, None, off=False), "hub at step 30, 0:01 old", "me/run has step 30"),
        (
            UploadStatus(20, 90.0, HTTP_503, off=False),
            "hub at step 20, 1:30 old, last error: HTTP 503",
            "me/run has step 20, not the newest: the Hub answers HTTP 503: maintenance. The same",
        ),
        (
            UploadStatus(None, None, HTTP_503, off=False),
            "hub has none yet, last error: HTTP 503",
            "me/run has nothing yet: the Hub answers",
        ),
        (
            UploadStatus(None, None, HTTP_503, off=False, was_read=False),
            "hub not reached yet, last error: HTTP 503",
            "me/run was never reached: the Hub answers HTTP 503: maintenance. The same command",
        ),
        (
            UploadStatus(None, None, None, off=False, was_read=False),
            "hub not reached yet",
            "me/run was never reached. The same command",
        ),
        (
            UploadStatus(20, None, StoreError("another attempt has it", "another"), off=True),
            "hub at step 20, uploads off",
            "me/run lacks the end of this run: uploads have stopped",
        ),
    ],
    ids=["done", "behind", "empty", "never reached", "never asked", "fenced"],
)
def test_what_is_known_of_the_hub_is_said_and_no_more(tmp_path, status, words, at_the_end):
    assert status.as_words() == words
    assert at_the_end in said_at_the_end(tmp_path, status)


def test_curves_that_cannot_be_read_cost_only_the_picture(finished_run, tmp_path):
    (tmp_path / "curves.png").mkdir()
    offered = []
    uploads = SimpleNamespace(
        status=lambda: UploadStatus(None, None, None, off=False),
        offer=lambda *of: offered.append(of),
    )
    config = load_config([f"run.dir={tmp_path}", "hub.repo_id=me/run"])
    folder = runs.snapshot(finished_run, 30)
    hand_over(Console(True, 30, 30), uploads, config, folder)
    ((snapshot, card, *_),) = offered
    assert (snapshot, card.curves) == (folder, None)
    assert "curves.png" not in card.text
