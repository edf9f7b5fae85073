"""Claims in a store that cannot create a file only where there is none, as a bucket of the Hub."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from store.files import Files
from store.files_ownership import FilesOwnership, claim_path
from store.ownership import AGAIN, DONE, Owner, utc
from store.store import RemoteFile, Transfer

RUN, SETTLE = "1" * 32, 0.1


class Memory(Files):
    """Files in memory, in which each write replaces what is there."""

    name = title = key = "memory"

    def __init__(self) -> None:
        super().__init__(5.0)
        self.content: dict[str, bytes] = {}
        self.before_send: Callable[[], object] = lambda: None

    def head(self, revision: str = "main") -> tuple[str, bool]:
        return "", True

    def create(self, private: bool) -> None:
        pass

    def remove(self) -> None:
        self.content.clear()

    def beside(self, suffix: str) -> str:
        return suffix

    def files(self, commit: str = "") -> dict[str, RemoteFile]:
        return {path: RemoteFile(len(found)) for path, found in self.content.items()}

    def read(self, commit: str, path: str, most: int) -> bytes:
        return self.content[path]

    def download_all(self, commit, files, folder, again=False) -> None:
        raise NotImplementedError

    def send(self, files, replaced=()):
        self.before_send()
        self.content |= {path: Path(file).read_bytes() for path, file in files.items()}
        return {}, Transfer()

    def put(self, files) -> None:
        self.before_send()
        self.content |= files

    def delete(self, paths) -> None:
        for path in paths:
            del self.content[path]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("store.files_ownership.SETTLE_SECONDS", SETTLE)


def attempt(letter: str) -> Owner:
    return Owner(RUN, letter * 32, 60.0, "laptop", since=utc())


def test_of_several_claims_with_one_number_one_counts():
    store, owners = Memory(), []
    for _ in range(3):
        ready, names = threading.Barrier(4), "abcd"

        def want(letter: str, ready=ready) -> None:
            ownership = FilesOwnership(store)
            ownership.look()
            ready.wait()
            if (owner := ownership.take(attempt(letter))) is not None:
                owners.append((owner.turn, letter))

        threads = [threading.Thread(target=want, args=(letter,)) for letter in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    turns = [turn for turn, _ in owners]
    assert len(turns) == len(set(turns))
    assert FilesOwnership(store).look().turn == 3


def test_a_claim_that_was_written_late_is_withdrawn():
    """Another attempt may have waited, and seen no other claim."""
    store = Memory()
    ownership = FilesOwnership(store)
    ownership.look()
    store.before_send = lambda: time.sleep(2 * SETTLE)
    assert ownership.take(attempt("a")) is None
    assert store.content == {}


def test_a_claim_beside_that_of_an_owner_who_lives_does_not_count():
    store = Memory()
    first, late = FilesOwnership(store), FilesOwnership(store)
    late.look()
    first.look()
    assert first.take(attempt("b")) is not None
    late._looked_at = time.monotonic()  # its machine was paused, and its clock as well
    assert late.take(attempt("a")) is None
    assert claim_path(1, "a" * 8) in store.content
    assert FilesOwnership(store).look().attempt_id == "b" * 32


def test_an_owner_has_waited_for_all_who_found_its_number_free():
    """One of them claims when the owner has looked for others, just before its first sign."""
    store, found = Memory(), []
    first, late = FilesOwnership(store), FilesOwnership(store)
    late.look()
    first.look()

    def claim_late() -> None:
        store.before_send = lambda: None
        found.append(late.take(attempt("a")))

    def after_the_claim() -> None:
        store.before_send = claim_late

    store.before_send = after_the_claim
    assert first.take(attempt("b")) is not None
    assert found == [None]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"run_id": 3}', b"{" * 9_000])
def test_a_claim_that_cannot_be_read_is_an_owner_that_nobody_knows(content):
    """It is waited for; it may be half written."""
    store = Memory()
    store.content[claim_path(7, None)] = content
    found = FilesOwnership(store).look()
    assert (found.attempt_id, found.turn, found.silence_seconds) == ("unknown", 7, 3600)
    ownership = FilesOwnership(store)
    ownership.look()
    assert ownership.take(attempt("a")).turn == 8


@pytest.mark.parametrize("silence", ["9", -1, 0, 1e99, None, True])
def test_what_a_sign_of_life_says_is_untrusted(silence):
    store = Memory()
    store.content[claim_path(1, None)] = json.dumps(
        {"run_id": RUN, "attempt_id": "a" * 32, "machine": "x|y\n", "silence_seconds": silence}
    ).encode()
    store.content[f"{RUN}/{'a' * 32}/alive.json"] = json.dumps(
        {"seen": "<b>", "ended": ["done"], "since": 7}
    ).encode()
    found = FilesOwnership(store).look()
    assert found.silence_seconds in (3600, 1)
    assert (found.seen, found.since, found.ended, found.machine) == ("", "", "", "x-y-")


@pytest.mark.parametrize(
    ("step", "ended", "counts"), [(50, AGAIN, True), (50, "", False), (40, AGAIN, False)]
)
def test_an_attempt_without_a_claim_counts_once_it_has_uploaded_after_the_owner_s_end(
    step, ended, counts
):
    """A start without hub.standby makes none. What the owner found there is not after its end."""
    store = Memory()
    ownership = FilesOwnership(store)
    ownership.look()
    owner = ownership.take(attempt("a"))
    ownership.release(owner.now(40, ended))
    folder = f"{RUN}/{'b' * 32}"
    store.content[f"{folder}/step-{step:08d}/manifest.json"] = b"{}"
    store.content[f"{folder}/alive.json"] = b'{"silence_seconds": 600, "signs": 3}'
    found = FilesOwnership(store).look()
    assert (found.attempt_id[0], found.turn) == ("b" if counts else "a", 1)
    if counts:
        assert (found.step, found.silence_seconds, found.ended) == (50, 600, "")
        assert FilesOwnership(store).look().sign == found.sign
        store.content[f"{folder}/alive.json"] = b'{"silence_seconds": 600, "signs": 4}'
        assert FilesOwnership(store).look().sign != found.sign


def test_signs_and_the_end_of_an_owner_are_in_its_own_folder():
    store = Memory()
    ownership = FilesOwnership(store)
    ownership.look()
    owner = ownership.take(attempt("a"))
    before = FilesOwnership(store).look().sign
    ownership.sign(owner)
    assert FilesOwnership(store).look().sign != before
    ownership.release(owner.now(40, DONE))
    assert FilesOwnership(store).look().ended == DONE
    assert {path.partition("/")[0] for path in store.content} == {claim_path(1, "a" * 8), RUN}
