"""At which steps a run saves: every so many, or every so many minutes."""

from __future__ import annotations

import signal
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from config.compose import load_config
from config.schema import ConfigError
from training.exits import EXIT_AGAIN, EXIT_TERMINATED
from training.run import stopping
from training.run.stopping import AGREE_SECONDS, Agreement, Due

STEP, STALL = 0.5, 0.02


class Attempt:
    """An attempt without a model: steps of so many `seconds`, snapshots that stall `STALL`."""

    device = torch.device("cpu")
    """Of an accelerator, in which the other processes give `answer`."""

    def __init__(
        self, monkeypatch, *words, processes=1, step=0, seconds=STEP, answer=(0.0, 0.0, 0.0)
    ):
        self.now, self.step, self.num_processes = 0.0, step, processes
        self.seconds, self.answer, self.compared = seconds, torch.tensor([answer]), []
        self.is_main_process = True
        monkeypatch.setattr(stopping.time, "monotonic", lambda: self.now)
        config = load_config(["train.max_steps=100000", *words])
        self.signals = SimpleNamespace(cause=None)
        self.signals.stop = lambda cause: setattr(self.signals, "cause", cause)
        self.agreement = Agreement(self, config, self.signals, age=0.0)
        self.saved = []

    def gather(self, tensor):
        self.compared.append(self.step)
        return torch.cat([tensor] + [self.answer] * (self.num_processes - 1))

    def take(self, steps):
        """Take steps, as a session does, until the end; those that were saved."""
        for _ in range(steps):
            self.step, self.now = self.step + 1, self.now + self.seconds
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


def test_a_limit_leaves_time_for_the_last_snapshot(monkeypatch):
    attempt = Attempt(monkeypatch, "run.max_minutes=2", "snapshot.every=100000")
    grace_seconds = load_config([]).run.grace_seconds
    attempt.take(1_000)
    assert 120 - grace_seconds - 2 < attempt.now < 120
    assert attempt.agreement.reason == "run.max_minutes=2"
    assert attempt.agreement.exit_code == EXIT_AGAIN


def test_a_signal_to_one_machine_ends_all(monkeypatch):
    attempt = Attempt(monkeypatch, processes=2, answer=(float(signal.SIGTERM), 0.0, 0.0))
    attempt.take(2)
    ended = (attempt.step, attempt.agreement.reason, attempt.agreement.exit_code)
    assert ended == (1, "SIGTERM", EXIT_TERMINATED)


def test_processes_do_not_trust_the_pace_of_the_first_steps(monkeypatch):
    attempt = Attempt(monkeypatch, processes=2, seconds=1e-3)
    attempt.take(63)
    assert attempt.compared == [1, 3, 7, 15, 31, 63]


def test_where_the_clock_decides_steps_do_not():
    load_config(["snapshot.every_minutes=5", "hub.milestone_every=99"])
    with pytest.raises(ConfigError, match=r"snapshot\.every=7 has no effect with"):
        load_config(["snapshot.every_minutes=5", "snapshot.every=7"])
