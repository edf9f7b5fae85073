"""At which steps a run saves: every so many, or every so many minutes."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from config.compose import load_config
from config.schema import ConfigError
from training.exits import EXIT_AGAIN
from training.run import stopping
from training.run.stopping import AGREE_SECONDS, Agreement, Due

STEP, STALL = 0.5, 0.02


class Attempt:
    """An attempt without a model: steps of `STEP` seconds, snapshots that stall `STALL`."""

    device = torch.device("cpu")
    """Of an accelerator, of which `processes` answer alike."""

    def __init__(self, monkeypatch, *words, processes=1, step=0):
        self.now, self.step, self.num_processes = 0.0, step, processes
        self.is_main_process = True
        monkeypatch.setattr(stopping.time, "monotonic", lambda: self.now)
        config = load_config(["train.max_steps=100000", *words])
        self.signals = SimpleNamespace(cause=None)
        self.signals.stop = lambda cause: setattr(self.signals, "cause", cause)
        self.agreement = Agreement(self, config, self.signals, step, age=0.0)
        self.saved = []

    def gather(self, tensor):
        return torch.cat([tensor] + [torch.zeros_like(tensor)] * (self.num_processes - 1))

    def take(self, steps):
        """Take steps, as a session does, until the end; those that were saved."""
        for _ in range(steps):
            self.step, self.now = self.step + 1, self.now + STEP
            due = self.agreement.after(self.step)
            if due.end:
                break
            if due.save:
                self.saved.append(self.step)
                self.now += STALL
        return self.saved


@pytest.mark.parametrize(("every", "due"), [(0, False), (500, True)])
def test_a_sample_is_due_at_the_last_step_unless_there_is_none(monkeypatch, every, due):
    attempt = Attempt(monkeypatch, f"train.sample_every={every}")
    assert attempt.agreement.after(100_000) == Due(True, True, due, True)


def test_a_number_of_steps_is_exact(monkeypatch):
    attempt = Attempt(monkeypatch, "snapshot.every=30", step=50)
    assert attempt.take(100) == [60, 90, 120, 150]


@pytest.mark.parametrize("processes", [1, 2])
def test_minutes_are_those_of_the_main_process_s_clock(monkeypatch, processes):
    saved = Attempt(monkeypatch, "snapshot.every_minutes=1", processes=processes).take(1_000)
    assert 120 <= saved[0] <= 120 + 2 * AGREE_SECONDS / STEP
    assert all(0 <= later - earlier - 120 <= 4 for earlier, later in pairwise(saved))
    assert len(saved) == 8


def test_milestones_and_what_may_be_the_best_are_saved_as_well(monkeypatch):
    attempt = Attempt(
        monkeypatch,
        *("snapshot.every_minutes=1000", "hub.milestone_every=70"),
        *("snapshot.keep_best=true", "train.eval_every=40"),
    )
    assert attempt.take(150) == [40, 70, 80, 120, 140]


def test_a_late_answer_makes_no_second_snapshot(monkeypatch):
    """That of a GPU is of an earlier step."""
    attempt = Attempt(monkeypatch, "snapshot.every_minutes=1", processes=2)
    agreement, answers = attempt.agreement, iter([(15, True), (16, True), (17, True)])
    agreement._largest_of_all = lambda *_: (lambda step, is_time: (step, 0, 1.0, is_time))(
        *next(answers)
    )
    assert [agreement.after(step).save for step in (16, 17, 18)] == [True, False, True]


def test_a_limit_leaves_time_for_the_last_snapshot(monkeypatch):
    attempt = Attempt(monkeypatch, "run.max_minutes=2", "snapshot.every=100000")
    grace_seconds = load_config([]).run.grace_seconds
    attempt.take(1_000)
    assert 120 - grace_seconds - 2 < attempt.now < 120
    assert attempt.agreement.reason == "run.max_minutes=2"
    assert attempt.agreement.exit_code == EXIT_AGAIN


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["snapshot.every=sometimes"], "snapshot.every=sometimes is not a whole number."),
        (["snapshot.every=0"], "snapshot.every=0 must be between 1 and 1000000000."),
        (["snapshot.every=1.5"], "snapshot.every=1.5 is not a whole number."),
        (["snapshot.every_minutes=0"], "must be between 1e-09 and 1000000, or null."),
        (["snapshot.every_minutes=5", "snapshot.every=7"], "snapshot.every=7 has no effect with"),
        (["hub.milestone_every=99"], "is not a multiple of snapshot.every=250"),
    ],
)
def test_a_mistake_is_a_sentence(words, sentence):
    with pytest.raises(ConfigError) as raised:
        load_config(words)
    assert sentence in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_a_milestone_may_lie_anywhere_where_the_clock_decides():
    load_config(["snapshot.every_minutes=5", "hub.milestone_every=99"])
