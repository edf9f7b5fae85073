"""`python -m snapshot status` says how far the run in a store is."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

import hubs
import runs
import stores
from snapshot.__main__ import main
from store.kinds import open_store

pytestmark = pytest.mark.filterwarnings(
    "ignore:Use 'content=:DeprecationWarning"  # huggingface_hub 2.4 calls httpx2 so
)
RUN, ATTEMPT = "1" * 32, "a" * 32


@pytest.fixture(params=stores.cases(stores.KINDS))
def url(request, tmp_path, monkeypatch):
    """The URL of a new store, to which this process is led."""
    with stores.place(request.param, tmp_path, monkeypatch) as place:
        place.open().create(private=True)
        yield place.url


def test_the_status_of_a_store(url, finished_run, capsys, monkeypatch):
    monkeypatch.setattr("store.attempt.platform.node", lambda: "my laptop|")
    store = open_store(url, 5.0)
    assert main(["status", url]) == 2
    assert "holds no run. Check the name." in capsys.readouterr().err
    uploads = hubs.uploader(store, run_id=RUN, attempt_id=ATTEMPT)
    hubs.upload_each(uploads, runs.snapshot(finished_run, 10))
    assert main(["status", url]) == 0
    said = capsys.readouterr().out
    assert "run       11111111 in " in said
    assert "attempt   aaaaaaaa, generation 1" in said
    assert "machine   my laptop|\n" in said
    assert "step      10 is the newest there" in said
    assert "Z, by the clock of that machine" in said


@pytest.mark.parametrize("words", [["status", "nothing/here/at/all"], ["status"], ["status", "."]])
def test_a_status_of_nothing_is_a_mistake(words, capsys):
    with pytest.raises(SystemExit) if len(words) == 1 else nullcontext():
        assert main(words) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_folder_of_a_run_is_no_store(finished_run, capsys):
    assert main(["status", str(finished_run)]) == 2
    assert "is a folder, and status is that of a store. The newest line of metrics.jsonl" in (
        capsys.readouterr().err
    )
