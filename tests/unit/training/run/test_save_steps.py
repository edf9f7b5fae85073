"""At which steps a run saves: every so many, or every so many minutes."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from config.compose import load_config
from config.schema import ConfigError
from training.exits import EXIT_AGAIN
from training.run import save_steps, stop
from training.run.save_steps import SaveSteps

STEP, STALL = 0.5, 0.02


class Run:
    """An attempt without a model: steps of `STEP` seconds, snapshots that stall `STALL`."""

    def __init__(self, monkeypatch, *words, processes=1, step=0):
        self.now, self.step = 0.0, step
        for module in (save_steps, stop):
            monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        self.config = load_config(["train.max_steps=100000", *words])
        self.saves = [SaveSteps(self.config, step, rank == 0) for rank in range(processes)]
        self.signals = SimpleNamespace(cause=None, stop=self.stop)
        self.saved = []

    def stop(self, number):
        self.signals.cause = number

    def take(self, steps):
        """Take steps, as a session does; the steps at which all processes have saved."""
        for _ in range(steps):
            self.step, self.now = self.step + 1, self.now + STEP
            answers = [one.is_time() for one in self.saves]
            for one in self.saves:
                one.agree(self.step, max(answers))
            due = {one.is_due(self.step) for one in self.saves}
            assert len(due) == 1, "processes differ"
            if due.pop():
                for one in self.saves:
                    one.saved(self.step)
                self.saved.append(self.step)
                self.now += STALL
        return self.saved


def test_a_number_of_steps_is_exact(monkeypatch):
    run = Run(monkeypatch, "snapshot.every=30", step=50)
    assert run.take(100) == [60, 90, 120, 150]


def test_minutes_are_those_of_the_clock(monkeypatch):
    run = Run(monkeypatch, "snapshot.every_minutes=1", processes=2)
    saved = run.take(1_000)
    assert saved[0] == 120
    assert all(0 <= later - earlier - 120 <= 1 for earlier, later in pairwise(saved))
    assert len(saved) == 8


def test_milestones_and_what_may_be_the_best_are_saved_as_well(monkeypatch):
    run = Run(
        monkeypatch,
        *("snapshot.every_minutes=1000", "hub.milestone_every=70"),
        *("snapshot.keep_best=true", "train.eval_every=40"),
    )
    assert run.take(150) == [40, 70, 80, 120, 140]


def test_a_late_answer_makes_no_second_snapshot(monkeypatch):
    saves = Run(monkeypatch, "snapshot.every_minutes=1").saves[0]
    saves.agree(15, True)
    assert saves.is_due(16)
    saves.saved(16)
    saves.agree(16, True)  # of a GPU, computed before that snapshot
    assert not saves.is_due(17)
    saves.agree(17, True)
    assert saves.is_due(18)


class Two:
    """An accelerator of two processes, of which the other one answers nothing."""

    num_processes, device = 2, torch.device("cpu")

    def gather(self, tensor):
        return torch.cat([tensor, torch.zeros_like(tensor)])


def test_a_snapshot_is_due_where_processes_agree_to_stop(monkeypatch):
    run = Run(monkeypatch, "snapshot.every_minutes=1")
    stopping = stop.Stop(Two(), run.config.run, run.signals, run.saves[0])
    due = 0
    while not due:
        run.now, run.step = run.now + STEP, run.step + 1
        assert not stopping.agreed(run.step)
        due = run.saves[0].is_due(run.step)
    assert 60 <= run.now < 60 + stop.AGREE_SECONDS


def test_a_limit_leaves_time_for_the_last_snapshot(monkeypatch):
    monkeypatch.setattr(stop, "seconds_since_launch", lambda: 0.0)
    run = Run(monkeypatch, "run.max_minutes=2")
    one = SimpleNamespace(num_processes=1)
    stopping = stop.Stop(one, run.config.run, run.signals, run.saves[0])
    for step in range(1, 1_000):
        run.now += STEP
        if stopping.agreed(step):
            break
    assert 120 - run.config.run.grace_seconds - 2 < run.now < 120
    assert (stopping.reason, stopping.exit_code) == ("run.max_minutes=2", EXIT_AGAIN)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["snapshot.every=sometimes"], "snapshot.every=sometimes is not a whole number."),
        (["snapshot.every=0"], "snapshot.every=0 must be at least 1."),
        (["snapshot.every=1.5"], "snapshot.every=1.5 is not a whole number."),
        (["snapshot.every_minutes=0"], "must be above 0 and below 1000000, or null."),
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
