"""When a standby takes over, with a clock of the test; and the thread that gives signs of life."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace

import pytest

from store.errors import HubUnreachable
from store.ownership import AGAIN, DONE, ENDS, PERSON, Owner, machine_name, owner_on_card, utc
from store.standby import JITTER, Hold, Verdict, Watch, longest_wait, with_jitter

OWNER = Owner("run", "a" * 32, 80.0, "laptop", utc(0), utc(0), step=40, sign="1")
STEPS = 100


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def looks(watch: Watch, clock: Clock, owner: Owner, seconds: float) -> Verdict:
    """Looks at an owner that gives no sign, for so long; the last verdict."""
    verdict, end = watch.judge(owner), clock.now + seconds
    while clock.now < end and not (verdict.is_free or verdict.ends):
        clock.now += watch.seconds_between_looks()
        verdict = watch.judge(owner)
    return verdict


def test_a_store_without_an_owner_and_attempts_that_are_over_are_free():
    assert Watch((), STEPS, Clock()).judge(None).is_free
    assert Watch({OWNER.attempt_id}, STEPS, Clock()).judge(OWNER).is_free


@pytest.mark.parametrize("seconds_late", [0.0, 7.0])
def test_a_silent_owner_is_free_within_the_bound_and_not_before_its_silence(seconds_late):
    """Looks may come late by their jitter. The bound is what the console says."""
    clock = Clock()
    watch, begun, chance = Watch((), STEPS, clock), clock.now, random.Random(7)
    assert not watch.judge(OWNER).is_free
    clock.now += seconds_late  # the owner was last heard before that
    while not watch.judge(OWNER).is_free:
        clock.now += with_jitter(watch.seconds_between_looks(), chance)
    waited = clock.now - begun
    assert OWNER.silence_seconds < waited <= longest_wait(OWNER.silence_seconds) + seconds_late


def test_each_sign_of_life_begins_the_silence_anew():
    clock = Clock()
    watch = Watch((), STEPS, clock)
    for number in range(50):
        assert not looks(watch, clock, replace(OWNER, sign=str(number)), 70.0).is_free
    assert looks(watch, clock, OWNER, 100.0).is_free


@pytest.mark.parametrize("change", [{"step": 41}, {"turn": 2}, {"attempt_id": "b" * 32}])
def test_a_new_step_and_another_owner_are_signs_of_life(change):
    clock = Clock()
    watch = Watch((), STEPS, clock)
    looks(watch, clock, OWNER, 70.0)
    assert looks(watch, clock, replace(OWNER, **change), 70.0) == Verdict(silent_seconds=70.0)


def test_time_in_which_the_store_cannot_be_read_is_no_silence():
    """The owner could not give a sign either, which the standby would read."""
    clock = Clock()
    watch = Watch((), STEPS, clock)
    looks(watch, clock, OWNER, 40.0)
    clock.now += 24 * 3600
    verdict = watch.judge(OWNER)
    assert not verdict.is_free
    assert verdict.silent_seconds == 40.0 + 2 * watch.seconds_between_looks()
    assert looks(watch, clock, OWNER, 40.0).is_free


@pytest.mark.parametrize(
    ("ended", "step", "ends"),
    [
        (DONE, STEPS, DONE),
        (DONE, STEPS - 1, ""),  # of a command with fewer steps
        (AGAIN, 40, ""),
        (PERSON, 40, PERSON),
    ],
)
def test_how_the_owner_ended_decides_what_a_waiting_standby_does(ended, step, ends):
    """A start after that end always begins; it is what a person asks for."""
    over = replace(OWNER, ended=ended, step=step)
    assert Watch((), STEPS, Clock()).judge(over) == Verdict(is_free=True)
    clock = Clock()
    watch = Watch((), STEPS, clock)
    watch.judge(OWNER)
    assert watch.judge(over) == Verdict(is_free=not ends, ends=ends)


def test_jitter_is_bounded():
    chance = random.Random(3)
    found = [with_jitter(8.0, chance) for _ in range(1000)]
    assert min(found) >= 8 * (1 - JITTER)
    assert max(found) <= 8 * (1 + JITTER)


def test_the_state_of_an_owner_in_words():
    assert OWNER.state(now=80) == "training"
    assert OWNER.state(now=81) == "silent: it announced a sign of life every 1:20 at most"
    assert [replace(OWNER, ended=end).state(now=9e9) for end in ENDS] == [*ENDS.values()]
    hostile = OWNER.with_texts("a|b\x1b[31m<b>`", "yesterday", "1 | 2", "never")
    assert (hostile.machine, hostile.since, hostile.seen, hostile.ended) == (
        "a-b-31m-b-",
        "",
        "",
        "",
    )
    assert "|" not in owner_on_card(hostile)
    assert len(machine_name("x" * 999)) == 80


class Meeting:
    """An ownership in memory."""

    def __init__(self) -> None:
        self.owner: Owner | None = OWNER
        self.signs: list[Owner] = []
        self.faults = 0
        self.released: list[Owner] = []

    def look(self) -> Owner | None:
        if self.faults:
            self.faults -= 1
            raise HubUnreachable("down")
        return self.owner

    def sign(self, mine: Owner) -> None:
        self.signs.append(mine)

    def release(self, mine: Owner) -> None:
        self.released.append(mine)


def wait_for(holds, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_an_owner_gives_signs_until_its_last_word():
    meeting, lost = Meeting(), []
    meeting.faults = 2
    hold = Hold(meeting, replace(OWNER, silence_seconds=0.04), lambda: lost.append(1)).begin()
    wait_for(lambda: len(meeting.signs) >= 3)
    hold.note(50)
    wait_for(lambda: meeting.signs[-1].step == 50)
    hold.release(DONE)
    hold.release(AGAIN)
    assert [one.ended for one in meeting.released] == [DONE]
    count = len(meeting.signs)
    time.sleep(0.1)
    assert (len(meeting.signs), lost) == (count, [])


def test_a_last_word_is_waited_for_again_by_who_asks_again():
    """The end of a run waits for it shortly; the handler of signals then waits on."""
    meeting, may_answer = Meeting(), threading.Event()
    word = meeting.release
    meeting.release = lambda mine: may_answer.wait(20) and word(mine)
    hold = Hold(meeting, OWNER, lambda: None)
    hold.release(PERSON, 0.01)
    hold.release(AGAIN, -1.0)
    assert meeting.released == []
    may_answer.set()
    hold.release(AGAIN, 20.0)
    assert [one.ended for one in meeting.released] == [PERSON]


def test_an_owner_whose_store_is_empty_has_not_lost_its_run():
    """Its disk is not mounted, or somebody deleted a file: no other attempt trains."""
    meeting, lost = Meeting(), []
    meeting.owner = None
    hold = Hold(meeting, replace(OWNER, silence_seconds=0.04), lambda: lost.append(1)).begin()
    wait_for(lambda: hold._failed > 2)
    assert (meeting.signs, lost) == ([], [])
    meeting.owner = OWNER
    wait_for(lambda: meeting.signs)
    hold.release(DONE)


def test_signs_of_life_that_fail_are_reported_once_until_one_succeeds():
    meeting, said = Meeting(), []
    hold = Hold(meeting, replace(OWNER, silence_seconds=0.04), lambda: None)
    meeting.faults = 1
    hold.begin()
    wait_for(lambda: meeting.signs)
    assert hold.messages() == []  # one that fails is usual
    for _ in range(2):
        meeting.faults, before = 5, len(meeting.signs)
        wait_for(lambda before=before: len(meeting.signs) > before + 1)
        said += hold.messages()
    hold.release(DONE)
    assert len(said) == 2
    assert "signs of life to standbys fail: down. Training continues" in said[0]


def test_an_owner_that_was_replaced_gives_no_sign_and_says_so_once():
    meeting, lost = Meeting(), threading.Semaphore(0)
    meeting.owner = replace(OWNER, attempt_id="b" * 32)
    hold = Hold(meeting, replace(OWNER, silence_seconds=0.04), lost.release).begin()
    assert lost.acquire(timeout=20)
    hold.lose()
    hold.release(DONE)
    assert not lost.acquire(timeout=0.1)
    assert (meeting.signs, meeting.released) == ([], [])
