"""What the main process of a standby says and decides, with a store and a clock of the test."""

from __future__ import annotations

import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest

from config.compose import load_config
from config.schema import ConfigError
from snapshot.errors import SnapshotError
from store.errors import HubNoRevision, HubRefused, HubUnreachable
from store.ownership import AGAIN, DONE, PERSON, Owner
from training.run import standby as file
from training.run.run_dir import attempts_in
from training.run.standby import ENDS_NOW, OWNS, WAITS, Standby

OWNER = Owner("1" * 32, "a" * 32, 120.0, "laptop", "2026-11-27T10:31:04Z", step=40, sign="1")


class Store:
    """An ownership in memory."""

    def __init__(self) -> None:
        self.owner: Owner | None = OWNER
        self.error: Exception | None = None
        self.refusal: Exception | None = None
        self.looks = 0
        self.is_slower = False
        """Whether another standby takes the run first."""

    def look(self) -> Owner | None:
        self.looks += 1
        if self.error is not None:
            raise self.error
        return self.owner

    def take(self, mine: Owner) -> Owner | None:
        if self.refusal is not None:
            raise self.refusal
        if self.is_slower:
            self.owner = replace(OWNER, attempt_id="c" * 32)
            return None
        self.owner = mine
        return mine

    def sign(self, mine: Owner) -> None:
        pass


@pytest.fixture
def scene(tmp_path, monkeypatch):
    """A standby, and what it says; `wait` lets time pass."""
    store, said, clock = Store(), [], [0.0]
    monkeypatch.setattr(file, "ownership_of", lambda hub: store)
    monkeypatch.setattr(file, "open_repo", lambda *_, **__: None)
    monkeypatch.setattr(file, "newest_state", lambda _: None)
    (tmp_path / "snapshots").mkdir()
    config = load_config([f"run.dir={tmp_path}", "hub.repo_id=me/run", "hub.standby=true"])
    signals = SimpleNamespace(cause=None, stop=lambda cause: None)

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    def make() -> Standby:
        hub = SimpleNamespace(hub=SimpleNamespace(name="me/run"))
        return Standby(config, hub, signals, said.append, lambda: clock[0], sleep)

    def wait(standby: Standby, seconds: float) -> tuple[str, int]:
        end, found = clock[0] + seconds, (WAITS, 0)
        while clock[0] < end and found[0] == WAITS:
            found = standby.step(10.0)
        return found

    return SimpleNamespace(**locals())


def test_a_standby_says_once_who_owns_the_run_and_takes_over_within_the_bound(scene):
    standby = scene.make()
    assert scene.wait(standby, 100) == (WAITS, 0)
    assert len(scene.said) == 1
    assert (
        "owned by attempt aaaaaaaa on laptop since 2026-11-27 10:31:04 UTC; step 40"
        in (scene.said[0])
    )
    assert "no sign of life for 2:00: at most 2:38 after the last one" in scene.said[0]
    assert scene.wait(standby, 1000) == (OWNS, 0)
    assert 120 < scene.clock[0] <= 158
    assert scene.store.looks <= 15
    assert "takes over from attempt aaaaaaaa on laptop at step 40: no sign of" in scene.said[-1]
    assert standby.hold.owner.run_id == OWNER.run_id
    assert attempts_in(scene.tmp_path) == {standby.hold.owner.attempt_id}


def test_the_first_start_owns_the_run_at_once(scene):
    scene.store.owner = None
    standby = scene.make()
    assert standby.step(10.0) == (OWNS, 0)
    assert standby.hold.owner.silence_seconds == 120
    assert scene.said == [
        "standby   owns me/run: another start waits, and takes over after 2:00 without a sign of "
        "life"
    ]


def test_a_restart_on_the_same_disk_does_not_wait(scene):
    (scene.tmp_path / "attempts.txt").write_text(f"{OWNER.attempt_id}\n")
    assert scene.make().step(10.0) == (OWNS, 0)


def test_another_run_on_this_disk_is_left_to_the_start_which_refuses_it(scene, monkeypatch):
    monkeypatch.setattr(file, "run_id_in", lambda _: "2" * 32)
    standby = scene.make()
    assert standby.step(10.0) == (OWNS, 0)
    assert (standby.hold, scene.store.owner) == (None, OWNER)
    scene.store.owner = replace(OWNER, step=0, ended=AGAIN)
    standby = scene.make()
    assert standby.step(10.0) == (OWNS, 0)
    assert standby.hold is not None


def test_of_two_standbys_the_slower_one_waits_for_the_other(scene):
    standby = scene.make()
    scene.store.is_slower = True
    assert scene.wait(standby, 200) == (WAITS, 0)
    assert "owned by attempt cccccccc" in scene.said[-1]


@pytest.mark.parametrize(
    ("ended", "found"), [(DONE, (ENDS_NOW, 0)), (PERSON, (ENDS_NOW, 130)), (AGAIN, (OWNS, 0))]
)
def test_what_follows_from_the_end_of_the_owner(scene, ended, found):
    standby = scene.make()
    scene.wait(standby, 20)
    scene.store.owner = replace(OWNER, ended=ended, step=1200)
    assert scene.wait(standby, 20) == found


def test_a_run_that_is_done_is_not_owned_again(scene):
    scene.store.owner = replace(OWNER, ended=DONE, step=1200)
    standby = scene.make()
    assert standby.step(10.0) == (OWNS, 0)
    assert standby.hold is None


def test_a_store_that_cannot_be_read_is_reported_once_and_asked_less_often(scene):
    standby = scene.make()
    scene.wait(standby, 60)
    scene.store.error = HubUnreachable("the Hub is down")
    before = scene.store.looks
    assert scene.wait(standby, 3600) == (WAITS, 0)
    assert scene.store.looks - before < 30
    assert sum("the Hub is down" in one for one in scene.said) == 1
    scene.store.error = None
    scene.wait(standby, 400)
    assert any("can be read again" in one for one in scene.said)


def test_a_store_that_is_empty_after_an_owner_was_seen_is_neither_free_nor_silent(scene):
    """Its disk is not mounted: a run that began there would be another one."""
    standby = scene.make()
    scene.wait(standby, 60)
    scene.store.owner = None
    assert scene.wait(standby, 3600) == (WAITS, 0)
    assert sum("the store is empty, and it held this run before" in one for one in scene.said) == 1
    scene.store.owner = OWNER
    assert scene.wait(standby, 400) == (OWNS, 0)
    assert "no time counts as silence" in scene.said[1]


def test_a_claim_whose_answer_was_lost_is_not_waited_for(scene):
    standby = scene.make()
    scene.store.owner = None

    def lost(mine: Owner) -> None:
        scene.store.owner = mine

    scene.store.take = lost
    assert scene.wait(standby, 20) == (OWNS, 0)
    assert scene.clock[0] < 5
    assert standby.hold.owner.attempt_id == standby._attempt_id
    assert "owns me/run" in scene.said[-1]


def test_an_empty_store_is_refused_where_this_run_has_used_one(scene, monkeypatch):
    """Also the folder of an unmounted disk is empty. Another machine's start has no such file."""
    scene.store.owner = None
    (scene.tmp_path / "attempts.txt").write_text(f"{OWNER.attempt_id}\n")
    with pytest.raises(HubUnreachable, match=r"is empty, and this run has used a store"):
        scene.make().step(10.0)
    monkeypatch.setattr(file, "run_id_in", lambda _: "2" * 32)  # it continues its own snapshot
    assert scene.make().step(10.0) == (OWNS, 0)


ERRORS = [HubUnreachable("down"), HubRefused("no token"), SnapshotError("damaged")]


@pytest.mark.parametrize("error", ERRORS)
def test_a_start_that_cannot_ask_does_not_train(scene, error):
    scene.store.error = error
    with pytest.raises(type(error)):
        scene.make().step(10.0)


@pytest.mark.parametrize("error", ERRORS)
def test_a_start_that_may_not_own_the_run_does_not_train(scene, error):
    scene.store.owner, scene.store.refusal = None, error
    with pytest.raises(type(error)):
        scene.make().step(10.0)


def test_a_commit_that_goes_between_two_requests_is_read_anew(scene):
    scene.store.error = HubNoRevision("squashed")
    standby = scene.make()
    assert standby.step(10.0) == (WAITS, 0)
    scene.store.error = scene.store.owner = None
    assert scene.wait(standby, 60) == (OWNS, 0)


@pytest.mark.parametrize("error", ERRORS[1:])
def test_a_standby_that_waits_is_not_ended_by_a_refusal(scene, error):
    standby = scene.make()
    scene.wait(standby, 60)
    scene.store.error = error
    assert scene.wait(standby, 500) == (WAITS, 0)


def test_a_notice_and_the_time_budget_end_the_wait(scene):
    standby = scene.make()
    scene.wait(standby, 30)
    scene.signals.cause = signal.SIGUSR1
    assert standby.step(10.0) == (ENDS_NOW, 75)
    scene.signals.cause = None
    standby._ends = scene.clock[0] + 5
    assert scene.wait(standby, 60) == (ENDS_NOW, 75)
    assert "run.max_minutes" in scene.said[-1]


@pytest.mark.parametrize(
    "words",
    [
        ["hub.standby=true"],
        ["hub.standby=true", "hub.repo_id=me/run", "hub.takeover=true"],
        ["hub.silence_seconds=1"],
    ],
)
def test_what_a_standby_excludes_is_refused(words):
    with pytest.raises(ConfigError, match=r"hub\.(standby=True|standby=true|silence_seconds=1)"):
        load_config(words)
