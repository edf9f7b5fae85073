"""Promise 4, inside this process: no error at any place of the upload thread ends the uploads."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from huggingface_hub.utils import get_session

import hubs
import runs
from loopback_hub import LoopbackHub
from store.attempt import Best
from store.hub import Hub
from store.kinds import open_store

pytestmark = pytest.mark.filterwarnings(
    "ignore:Use 'content=:DeprecationWarning"  # huggingface_hub 2.4 calls httpx2 so
)
ROOM = str(runs.ROOT / "store")
ERRORS = [
    lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    lambda: OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    lambda: PermissionError(errno.EACCES, os.strerror(errno.EACCES)),
    lambda: MemoryError(),
    lambda: RuntimeError("can't start new thread"),
]


class Injection:
    """Raises an error in the upload thread, at one of its calls of a function of store."""

    def __init__(
        self, number: int | None, error: Callable[[], Exception], function: str = ""
    ) -> None:
        """At the call of that number, from 1: of all, or of those of a function of that name."""
        self.calls, self.number, self.error, self.function = 0, number, error, function
        self.place = ""

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        mine = event == "call" and threading.current_thread().name == "uploader"
        mine = mine and self.function in ("", code.co_name)
        if mine and code.co_filename.startswith(ROOM) and code.co_name != "_work":
            self.calls += 1
            if self.calls == self.number:
                self.place = f"{Path(code.co_filename).name}, {code.co_name}"
                raise self.error()


def uploaded_through(hub: LoopbackHub, finished_run: Path, injection: Injection) -> None:
    """Three snapshots are offered, one after the other, and the newest gets to the hub."""
    hub.create(hubs.REPO)
    threading.settrace(injection)
    try:
        uploads = hubs.uploader(Hub(hubs.REPO, 5.0), keep=1, milestone_every=20)
    finally:
        threading.settrace(None)
    folders = [runs.snapshot(finished_run, step) for step in (10, 20, 30)]
    for folder in folders:
        uploads.offer(folder, hubs.card(folder), Best(10, 1.0))
        assert uploads.flush(300), (injection.place, uploads.status(), uploads.messages())
    status = uploads.status()
    assert (status.step, status.failure_text, status.off) == (30, None, False), injection.place
    assert hubs.step_of(hub) == 30, injection.place
    assert "uploader" in {thread.name for thread in threading.enumerate()}
    assert "step-00000020" in hub.repo(hubs.REPO).tags
    hubs.assert_always_whole(hub)


@pytest.mark.parametrize(
    "every", [pytest.param(60, id="some"), pytest.param(1, marks=pytest.mark.slow, id="all")]
)
def test_an_error_at_any_place_costs_a_retry(monkeypatch, finished_run, every):
    """At each place, or at a random one of each 60, in the order of the calls."""
    monkeypatch.setattr("store.uploader.FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr("store.uploader.FLUSH_DELAY_SECONDS", 0.05)
    monkeypatch.setattr("store.uploader.REPROBE_SECONDS", 0.05)
    chosen = random.Random(8)

    def with_error(number: int | None) -> Injection:
        injection = Injection(number, chosen.choice(ERRORS))
        with LoopbackHub(new_port=True, use_xet=False) as hub:
            hubs.lead_here(hub, monkeypatch)
            uploaded_through(hub, finished_run, injection)
        return injection

    total = with_error(None).calls
    places = [with_error(n + chosen.randrange(every)).place for n in range(1, total, every)]
    print(f"{total} calls; errors in: {'; '.join(places)}")
    assert total > 100


@pytest.mark.parametrize(
    ("function", "call"),
    [
        *[(name, 1) for name in ("_next", "_upload_next", "_end")],
        # Between a commit and its tag. After the first, the repo is no longer nobody's.
        *[("is_milestone", call) for call in (1, 2)],
    ],
)
def test_an_error_beside_the_upload_itself_ends_no_uploads(
    near_hub, monkeypatch, finished_run, function, call
):
    """Each snapshot is committed once."""
    monkeypatch.setattr("store.uploader.FIRST_DELAY_SECONDS", 0.01)
    injection = Injection(call, ERRORS[0], function)
    uploaded_through(near_hub, finished_run, injection)
    assert injection.place.endswith(f", {function}")
    assert [one["step"] for one in hubs.all_latest(near_hub)] == [10, 20, 30]


def test_no_request_is_cut_off_when_the_store_is_named_again():
    """The end of a run does that, and all requests of a process share one HTTP client."""
    Hub(hubs.REPO, 5.0)
    client = get_session()
    Hub("me/model", 5.0)
    open_store("hf://buckets/me/run", 5.0)
    assert get_session() is client
    assert not client.is_closed
    assert client.timeout.read == 5.0
    Hub(hubs.REPO, 6.0)
    assert get_session().timeout.read == 6.0
