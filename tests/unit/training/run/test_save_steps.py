"""At which steps a run saves: every so many, so many minutes, or as often as loses least."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from config.compose import load_config
from config.schema import ConfigError
from snapshot.interval import best_interval
from store.goodput import DATA, PASSES, PHASES, UPDATE, Reading
from training.exits import EXIT_AGAIN, EXIT_USER_MISTAKE
from training.reporting.events import Events
from training.run import cost, save_steps, stop
from training.run.save_steps import TIMED_STEPS, WARM_UP, SaveSteps

STEP, STALL = 0.5, 0.02
KNOWN = WARM_UP + TIMED_STEPS
"""The step after which the time of a step is known."""


class Run:
    """An attempt without a model: steps of `STEP` seconds, snapshots that stall `STALL`."""

    def __init__(self, monkeypatch, *words, processes=1, seen=(0, 0.0), step=0, disk_stays=False):
        self.now, self.step, self.said, self.notes = 0.0, step, [], []
        for module in (save_steps, stop):
            monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        self.config = load_config(["train.max_steps=100000", *words])
        self.report = SimpleNamespace(
            console=SimpleNamespace(
                step=step, say=self.said.append, note=lambda *words: self.notes.append(words)
            ),
            clock=SimpleNamespace(so_far=self.clock),
            uploads=None,
            stall_seconds=[],
            durable_seconds=[],
            check_seconds=0.0,
        )
        self.saves = [
            SaveSteps(self.config, self.report, rank == 0, 10_000, seen, disk_stays)
            for rank in range(processes)
        ]
        self.signals = SimpleNamespace(cause=None, own_cause=0, stop=self.stop)
        self.saved = []

    def stop(self, number):
        self.signals.cause = number

    def clock(self):
        steps = self.now - STALL * len(self.report.stall_seconds)
        return dict.fromkeys(PHASES, 0.0) | {DATA: 0.0, PASSES: 0.8 * steps, UPDATE: 0.2 * steps}

    def take(self, steps):
        """Take steps, as a session does; the steps at which all processes have saved."""
        for _ in range(steps):
            self.step, self.now = self.step + 1, self.now + STEP
            answers = [one.ahead(self.step) for one in self.saves]
            for one in self.saves:
                one.agree(self.step, max(answers))
            due = {one.is_due(self.step) for one in self.saves}
            assert len(due) == 1, "processes differ"
            if due.pop():
                for one in self.saves:
                    one.saved(self.step)
                self.saved.append(self.step)
                self.now += STALL
                self.report.stall_seconds.append(STALL)
                self.report.durable_seconds.append(1.0)
        return self.saved


def test_a_number_of_steps_is_exact(monkeypatch):
    run = Run(monkeypatch, "snapshot.every=30", step=50)
    assert run.take(100) == [60, 90, 120, 150]
    assert run.said == []


def test_minutes_are_those_of_the_clock(monkeypatch):
    run = Run(monkeypatch, "snapshot.every_minutes=1", processes=2)
    saved = run.take(1_000)
    assert saved[0] == 120
    assert all(0 <= later - earlier - 120 <= 1 for earlier, later in pairwise(saved))
    assert len(saved) == 8


def test_the_interval_is_the_best_one_and_changes_seldom(monkeypatch):
    run = Run(monkeypatch, "snapshot.every=auto", "run.interruptions_per_day=50", processes=3)
    saved = run.take(3_000)
    best = best_interval(STALL, 86_400 / 50) / STEP
    between = [later - earlier for earlier, later in pairwise(saved[1:])]
    assert set(between) == {round(best)}
    assert len(run.said) == 2, "a guess, and what was measured"
    assert "before the first snapshot is measured" in run.said[0]
    assert "50 interruptions a day (run.interruptions_per_day)" in run.said[1]
    assert [kind for kind, *_ in run.notes] == ["changed"]


def test_nothing_is_saved_before_the_time_of_a_step_is_known(monkeypatch):
    run = Run(monkeypatch, "snapshot.every=auto", "run.interruptions_per_day=80000", step=20)
    assert run.take(KNOWN - 1) == []
    assert run.take(1) == [20 + KNOWN]


def test_a_run_that_is_interrupted_often_saves_more_often(monkeypatch):
    seldom = Run(monkeypatch, "snapshot.every=auto").take(5_000)
    often = Run(monkeypatch, "snapshot.every=auto", seen=(400, 86_400.0)).take(5_000)
    assert len(often) > 5 * len(seldom) > 0


def test_an_upload_that_takes_long_leaves_fewer_snapshots_where_a_disk_may_be_lost(monkeypatch):
    words = "snapshot.every=auto", "hub.min_interval_seconds=5"

    def interval(**more):
        run = Run(monkeypatch, *words, **more)
        run.report.uploads = SimpleNamespace(status=lambda: SimpleNamespace(upload_seconds=500.0))
        run.take(5_000)
        return run.saved[-1] - run.saved[-2]

    assert interval() == 500 / STEP
    assert interval(disk_stays=True) < 500 / STEP / 2


def test_milestones_and_what_may_be_the_best_are_saved_as_well(monkeypatch):
    run = Run(
        monkeypatch,
        *("snapshot.every_minutes=1000", "hub.milestone_every=70"),
        *("snapshot.keep_best=true", "train.eval_every=40"),
    )
    assert run.take(150) == [40, 70, 80, 120, 140]


def test_a_late_answer_moves_no_snapshot_that_was_made(monkeypatch):
    saves = Run(monkeypatch, "snapshot.every=auto").saves[0]
    saves.agree(10, 1.0 + 5)
    assert [saves.is_due(step) for step in (14, 15, 16)] == [False, True, True]
    saves.saved(16)
    saves.agree(12, 1.0 + 3)  # of a GPU, computed before that snapshot
    assert not saves.is_due(17)


class Two:
    """An accelerator of two processes, of which the other one answers nothing."""

    num_processes, device = 2, torch.device("cpu")

    def gather(self, tensor):
        return torch.cat([tensor, torch.zeros_like(tensor)])


def test_the_next_snapshot_is_announced_where_processes_agree_to_stop(monkeypatch):
    run = Run(monkeypatch, "snapshot.every_minutes=1")
    stopping = stop.Stop(Two(), run.config.run, run.signals, run.saves[0])
    for step in range(1, 121):
        run.now += STEP
        assert not stopping.agreed(step)
        if run.saves[0].is_due(step):
            break
    assert step == 120


@pytest.mark.parametrize(
    ("words", "spent_at", "reason", "code"),
    [
        (["run.max_minutes=2"], float("inf"), "run.max_minutes=2", EXIT_AGAIN),
        (["run.max_cost=3", "run.price_per_hour=2"], 100.0, "run.max_cost=3", EXIT_USER_MISTAKE),
        (
            ["run.max_cost=3", "run.price_per_hour=2", "run.max_minutes=200"],
            100.0,
            "run.max_cost=3",
            EXIT_USER_MISTAKE,
        ),
    ],
)
def test_a_limit_leaves_time_for_the_last_snapshot(monkeypatch, words, spent_at, reason, code):
    monkeypatch.setattr(stop, "seconds_since_launch", lambda: 0.0)
    run = Run(monkeypatch, *words)
    one = SimpleNamespace(num_processes=1)
    stopping = stop.Stop(one, run.config.run, run.signals, run.saves[0], spent_at)
    for step in range(1, 1_000):
        run.now += STEP
        if stopping.agreed(step):
            break
    limit = min(spent_at, 60 * (run.config.run.max_minutes or 1e9))
    assert limit - run.config.run.grace_seconds - 2 < run.now < limit
    assert (stopping.reason, stopping.exit_code) == (reason, code)
    assert bool(stopping.needed_change) is (code == EXIT_USER_MISTAKE)


def spent(run_dir, seconds, machines=1, price=None):
    run_dir.mkdir(exist_ok=True)
    Events(run_dir / "events.jsonl", "a" * 32).read_clock(
        Reading("a" * 8, 0, 9, 9, machines, 1.7e9, 0.0, {PASSES: seconds}, price=price)
    )


def config_of(run_dir, *words):
    return load_config([f"run.dir={run_dir}", "run.price_per_hour=3", *words])


def test_money_is_spent_by_all_attempts_and_machines(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    config = config_of(run_dir, "run.max_cost=12")
    assert cost.seconds_to_spend(config) == pytest.approx(4 * 3_600)
    spent(run_dir, 3_600.0, machines=2)
    assert cost.seconds_to_spend(config) == pytest.approx(2 * 3_600)
    monkeypatch.setattr(cost, "machines", lambda: 4)
    assert cost.seconds_to_spend(config) == pytest.approx(1_800)
    assert cost.seconds_to_spend(config_of(run_dir)) == float("inf")


def test_a_run_whose_money_is_spent_is_refused_with_the_remedy(tmp_path):
    run_dir = tmp_path / "run"
    spent(run_dir, 4 * 3_600.0)
    with pytest.raises(
        ConfigError, match=r"run.max_cost=12 is spent: .* cost 12.00 .*run.max_cost"
    ):
        cost.refuse_spent(config_of(run_dir, "run.max_cost=12"), 9)
    cost.refuse_spent(config_of(run_dir, "run.max_cost=24"), 9)
    cost.refuse_spent(config_of(run_dir, "run.max_cost=12", "train.max_steps=9"), 9)
    cost.refuse_spent(config_of(run_dir), 9)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["snapshot.every=sometimes"], "snapshot.every=sometimes must be a whole number or auto."),
        (["snapshot.every=0"], "snapshot.every=0 must be at least 1, or auto."),
        (["snapshot.every=1.5"], "snapshot.every=1.5 is not a whole number or auto."),
        (["snapshot.every_minutes=0"], "must be above 0 and below 1000000, or null."),
        (["snapshot.every_minutes=5", "snapshot.every=auto"], "excludes snapshot.every=auto"),
        (["snapshot.every_minutes=5", "snapshot.every=7"], "snapshot.every=7 has no effect with"),
        (["run.max_cost=5"], "run.max_cost=5.0 needs run.price_per_hour"),
        (["run.price_per_hour=-1"], "run.price_per_hour=-1.0 must be above 0"),
        (["run.interruptions_per_day=0"], "run.interruptions_per_day=0.0 must be above 0"),
        (["hub.milestone_every=99"], "is not a multiple of snapshot.every=250"),
    ],
)
def test_a_mistake_is_a_sentence(words, sentence):
    with pytest.raises(ConfigError) as raised:
        load_config(words)
    assert sentence in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_a_milestone_may_lie_anywhere_where_the_clock_decides():
    for words in (["snapshot.every=auto"], ["snapshot.every_minutes=5"]):
        load_config([*words, "hub.milestone_every=99"])
