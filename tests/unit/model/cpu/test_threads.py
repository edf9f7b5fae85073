"""One thread instead of several where other programs use the cores, and nothing else changes it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DynamoBackend

import runs
import training.run.tuning
from model.cpu.cores import cores


class Machine:
    """A CPU whose speed a test decides: seconds by the number of threads."""

    def __init__(self, monkeypatch, most: int = 2) -> None:
        self.monkeypatch = monkeypatch
        for name in ("use_one_heap", "keep_freed_memory"):  # for good, in the process of the tests
            monkeypatch.setattr(training.run.tuning, name, lambda *_: None)
        monkeypatch.setattr("model.cpu.threads.cores", lambda: most)
        self.threads, self.seconds, self.clock = most, {most: 0.01, 1: 0.02}, 0.0
        monkeypatch.setattr(torch, "get_num_threads", lambda: self.threads)
        monkeypatch.setattr(
            torch, "set_num_threads", lambda number: setattr(self, "threads", number)
        )
        monkeypatch.setattr("time.perf_counter", lambda: self.clock)
        self.warnings: list[str] = []

    def start(self, adapt: bool = True, processes: int = 1, device: str = "cpu", **plugin) -> None:
        backend = plugin.get("backend", DynamoBackend.NO)
        accelerator = SimpleNamespace(
            device=SimpleNamespace(type=device),
            num_processes=processes,
            gradient_accumulation_steps=1,
            is_fsdp2=False,
            state=SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=backend)),
        )
        self.monkeypatch.setattr(training.run.tuning, "on_cpu", lambda: device == "cpu")
        config = SimpleNamespace(run=SimpleNamespace(adapt_threads=adapt, attention="auto"))
        tuning = training.run.tuning.tuning_for(accelerator, config)
        tuning.loaded(self.warnings.append)
        tuning.watch(self.compute, plugin.get("flop", 4e9))
        self.chosen = tuning.threads

    def compute(self) -> None:
        self.clock += self.seconds[self.threads]

    def steps(self, intervals: int) -> list[int]:
        """The number of threads in each interval of 20 steps."""
        used = []
        for _ in range(intervals):
            used.append(self.threads)
            if self.chosen is not None:
                self.chosen.report_pace(self.seconds[self.threads])
        return used


@pytest.fixture
def machine(monkeypatch) -> Machine:
    return Machine(monkeypatch)


def test_a_quiet_machine_keeps_its_threads(machine):
    machine.start()
    assert machine.steps(5) == [2] * 5
    assert machine.warnings == []


def test_a_machine_that_is_busy_at_the_start_uses_one_thread(machine):
    machine.seconds[2] = 0.1
    machine.start()
    assert machine.steps(5) == [1] * 5
    (warning,) = machine.warnings
    assert "takes 0.1 s with 2 threads and 0.02 s with one" in warning
    assert "run.adapt_threads=false" in warning


def test_a_machine_that_gets_busy_changes_after_a_slow_interval(machine):
    machine.start()
    assert machine.steps(3) == [2] * 3
    machine.seconds[2] = 0.1
    assert machine.steps(5) == [2, 1, 1, 1, 1]
    assert len(machine.warnings) == 1


def test_a_machine_that_seemed_quiet_changes_after_the_first(machine):
    machine.start()
    machine.seconds[2] = 0.1  # the passes of the start were lucky
    assert machine.steps(4) == [2, 1, 1, 1]


def test_a_limit_on_cpu_time_is_noticed(machine):
    """The passes at the start are within it. In steps, two threads take 1.2 times as long."""
    machine.start()
    machine.seconds[2] = 0.024
    assert machine.steps(4) == [2, 1, 1, 1]


def test_steps_that_are_slow_for_another_reason_change_nothing(machine):
    """Such as a disk: no step is computed with another number, so bits stay the same."""
    machine.start()
    machine.steps(3)
    for seconds in (0.5, 0.5, 0.01, 0.5):
        machine.chosen.report_pace(seconds)
        assert machine.threads == 2
    assert machine.warnings == []


@pytest.mark.parametrize(
    "options",
    [
        {"adapt": False},
        {"processes": 2},
        {"device": "cuda"},
        {"backend": DynamoBackend.INDUCTOR},
    ],
)
def test_what_has_no_choice_never_changes(machine, options):
    machine.seconds[2] = 0.1
    machine.start(**options)
    assert machine.steps(5) == [2] * 5
    assert machine.warnings == []


def test_one_thread_is_all_there_is(monkeypatch):
    machine = Machine(monkeypatch, most=1)
    machine.start()
    assert machine.steps(3) == [1] * 3


def test_a_large_pass_is_not_measured(machine):
    machine.seconds = {2: 10.0, 1: 1.0}
    machine.start(flop=1e12)
    assert machine.steps(3) == [2] * 3
    assert machine.clock == 0.0


def test_a_slow_small_pass_on_a_busy_machine_is_measured(machine):
    machine.seconds = {2: 4.0, 1: 0.7}
    machine.start()
    assert machine.steps(3) == [1] * 3


@pytest.mark.slow
def test_measuring_changes_no_loss(small, tmp_path):
    """Two threads are asked for, and measured, or not."""
    if cores() < 2:
        pytest.skip("a process on one core has one thread, unless it may not adapt")
    found = []
    for adapt in ("true", "false"):
        words = [f"run.adapt_threads={adapt}", "model.dropout=0.1", f"run.dir={tmp_path / adapt}"]
        result = runs.train(*small, *words, "train.max_steps=3", OMP_NUM_THREADS="2")
        assert result.returncode == 0, result.stderr
        if "One is used from now on" not in result.stdout:
            found.append(runs.losses(tmp_path / adapt))
    assert found[0] == found[-1]
