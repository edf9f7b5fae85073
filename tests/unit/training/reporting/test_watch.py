"""What is said before it is too late: slow steps, steep gradients, a full disk, a clock."""

from __future__ import annotations

import time
from types import SimpleNamespace

import psutil
import pytest

import hubs
import runs
from config.schema import Config, RunConfig
from disks import as_anybody
from training.reporting import timing
from training.reporting.console import Console
from training.reporting.report import Report
from training.reporting.timing import REMEMBERED, Watchdog


class Clock:
    """Stands in for the module's `time`."""

    def __init__(self) -> None:
        self.steady, self.of_day = 100.0, 1e9

    def monotonic(self) -> float:
        return self.steady

    def perf_counter(self) -> float:
        return self.steady

    def time(self) -> float:
        return self.of_day

    def pass_by(self, seconds: float) -> None:
        self.steady += seconds
        self.of_day += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


@pytest.fixture
def watch(clock, tmp_path) -> Watchdog:
    """A watch whose thread does not run, of snapshots of 12,000 bytes on two processes."""
    (tmp_path / "snapshots").mkdir()
    silent = Console(shown=False, max_steps=1000, step=0)
    watch = Watchdog(silent, Config(run=RunConfig(dir=str(tmp_path))), 12_000, processes=2)
    silent.shown = True
    watch.resume()
    return watch


def said(capsys) -> str:
    return capsys.readouterr().out


def take_steps(
    watch: Watchdog, clock: Clock, seconds: float, first: int = 1, last: int = 60
) -> None:
    for step in range(first, last + 1):
        clock.pass_by(seconds)
        watch.done(step)


def test_a_hanging_step_is_reported_once_while_it_hangs(watch, clock, capsys):
    take_steps(watch, clock, 1.0)
    clock.pass_by(9.9)
    watch._look_at_step()
    assert said(capsys) == ""
    clock.pass_by(0.2)
    watch._look_at_step()
    watch._look_at_step()
    text = said(capsys)
    assert text.count("since step 60, 10 s ago, over 10 times the usual 1 s") == 1
    assert "answer within run.collective_timeout_seconds=180" in text
    clock.pass_by(5)
    watch.done(61)
    assert "step 61 has finished after 15 s" in said(capsys)


def test_short_steps_that_vary_are_not_reported(watch, clock, capsys):
    take_steps(watch, clock, 0.01)
    clock.pass_by(4)
    watch._look_at_step()
    watch.done(61)
    watch.rest()  # an evaluation, a snapshot
    clock.pass_by(1000)
    watch._look_at_step()
    watch.resume()
    watch._look_at_step()
    assert said(capsys) == ""


def test_what_a_step_waits_for_is_not_counted_as_its_own_time(watch, clock, capsys):
    def long_writing() -> None:
        clock.pass_by(1000)
        watch._look_at_step()

    take_steps(watch, clock, 1.0)
    clock.pass_by(6)
    watch.wait_for(long_writing)
    clock.pass_by(3.9)
    watch._look_at_step()
    assert said(capsys) == ""
    clock.pass_by(0.2)
    watch._look_at_step()
    watch.done(61)
    assert "10 s ago, over 10 times the usual 1 s" in said(capsys)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_steps_longer_than_a_stop_may_take_get_one_hint(watch, clock, capsys, kind):
    """Also on a GPU, whose steps are known to be done only when they are logged."""
    report = Report(watch._console, None, 1, None, watchdog=watch)
    figure = SimpleNamespace(device=SimpleNamespace(type=kind))
    for seconds in (1000.0, 40.0, 40.0):  # the first one is compiled
        clock.pass_by(seconds)
        report.add(1, 0.1, figure, figure)
    text = said(capsys)
    assert text.count("hint      a step takes 40 s, longer than run.grace_seconds=25: a run") == 1
    assert "Raise run.grace_seconds, and with it the time from the scheduler's" in text


def test_what_steps_wait_for_is_not_their_length(watch, clock, capsys):
    watch.queued()
    watch.rest()  # an evaluation, a snapshot
    clock.pass_by(1000)
    watch.resume()
    clock.pass_by(20)
    watch.wait_for(lambda: clock.pass_by(1000))
    clock.pass_by(4)
    watch.queued()
    assert said(capsys) == ""


def test_a_gradient_of_a_hundred_times_the_usual_is_said(watch, capsys):
    for step in range(1, REMEMBERED + 1):
        watch.gradient(step, 1.5)
    watch.gradient(51, 149.0)
    assert said(capsys) == ""
    watch.gradient(52, 300.0)
    text = said(capsys)
    assert "the gradient norm is 300 at step 52, 200 times the usual 1.5" in text
    assert "optim.max_grad_norm=1" in text


def test_an_update_that_fp16_leaves_out_is_no_steep_gradient(watch, capsys):
    for step in range(1, REMEMBERED + 1):
        watch.gradient(step, 1.5)
    for norm in (float("inf"), float("nan")):
        watch.gradient(51, norm)
    assert said(capsys) == ""


def test_a_gradient_after_none_at_all_is_no_error(watch, capsys):
    for step in range(1, REMEMBERED + 1):
        watch.gradient(step, 0.0)
    watch.gradient(51, 1.5)
    assert said(capsys) == ""


def test_a_gradient_that_is_not_scaled_down_is_not_said_to_be(watch, capsys):
    watch._config.optim.max_grad_norm = float("inf")
    for step in range(1, REMEMBERED + 1):
        watch.gradient(step, 1.5)
    watch.gradient(51, 300.0)
    assert "That is within optim.max_grad_norm=inf" in said(capsys)


def test_the_next_snapshot_is_never_after_the_last_step(
    watch, clock, capsys, monkeypatch, tmp_path
):
    usage = type("Usage", (), {"free": 1})
    monkeypatch.setattr(timing.shutil, "disk_usage", lambda _: usage)
    watch._config.train.max_steps, watch._config.snapshot.every = 60, 40
    take_steps(watch, clock, 0.1, 1, 50)
    watch._look_at_disk()
    assert "the next snapshot, at step 60, takes" in said(capsys)
    watch._told_full = False
    (tmp_path / "snapshots" / "step-00000060").mkdir()
    watch._look_at_disk()
    assert said(capsys) == ""


def test_a_resumed_run_counts_from_where_it_was(clock, capsys, monkeypatch, tmp_path):
    (tmp_path / "snapshots").mkdir()
    usage = type("Usage", (), {"free": 1})
    monkeypatch.setattr(timing.shutil, "disk_usage", lambda _: usage)
    console = Console(shown=False, max_steps=1000, step=600)
    watch = Watchdog(console, Config(run=RunConfig(dir=str(tmp_path))), 12_000, processes=1)
    console.shown = True
    watch._look_at_disk()
    assert "the next snapshot, at step 750," in said(capsys)


def test_a_clock_that_jumps_is_reported(watch, clock, capsys):
    clock.of_day += 1
    watch._look_at_clock()
    assert said(capsys) == ""
    clock.of_day -= 3600
    watch._look_at_clock()
    watch._look_at_clock()
    assert said(capsys).count("the system's clock has jumped by -3599 s") == 1


def test_a_disk_that_will_be_full_is_reported_in_time(watch, clock, capsys, monkeypatch, tmp_path):
    def disk_with(free: int) -> None:
        usage = type("Usage", (), {"free": free})
        monkeypatch.setattr(timing.shutil, "disk_usage", lambda _: usage)

    take_steps(watch, clock, 0.1)
    disk_with(12_000)  # 1,000 parameters: as nothing is known yet, 12 bytes each
    watch._look_at_disk()
    assert said(capsys) == ""
    disk_with(11_999)
    watch._look_at_disk()
    watch._look_at_disk()
    assert said(capsys).count("the next snapshot, at step 250, takes 0.0 MB. Free some space") == 1
    disk_with(10**9)
    watch._look_at_disk()
    (tmp_path / "snapshots" / "step-00000010").mkdir()
    (tmp_path / "snapshots" / "step-00000010" / "model.safetensors").write_bytes(bytes(2 * 10**6))
    disk_with(1_500_000)
    watch._look_at_disk()
    assert "has 1.5 MB left and the next snapshot, at step 250, takes 2.0 MB" in said(capsys)
    disk_with(10**9)
    watch._look_at_disk()
    disk_with(1_500_000)
    being_written = tmp_path / "snapshots" / ".tmp-step-00000250"
    being_written.mkdir()  # after it the oldest goes
    watch._look_at_disk()
    assert said(capsys) == ""
    being_written.rmdir()
    watch._look_at_disk()
    assert "has 1.5 MB left" in said(capsys)


def test_a_folder_closed_during_a_run_does_not_end_the_watch(watch, tmp_path):
    (tmp_path / "snapshots").chmod(0)
    with as_anybody():
        watch._look_at_disk()


@pytest.mark.thorough
def test_a_neighbour_that_hangs_is_said_during_the_run(small, tmp_path):
    words = [*small, "train.max_steps=100000", f"run.dir={tmp_path / 'run'}"]
    with runs.started(runs.launch_command("ddp_cpu.yaml", *words)) as launcher:
        runs.wait_until(lambda: runs.newest_step(tmp_path / "run") > 60, launcher)
        one = runs.workers(launcher)[1]
        one.suspend()
        time.sleep(timing.SLOW_SECONDS + 3 * timing.LOOK_SECONDS)
        one.resume()
        step = runs.newest_step(tmp_path / "run")
        runs.wait_until(lambda: runs.newest_step(tmp_path / "run") > step + 5, launcher)
        launcher.terminate()
        psutil.wait_procs([one], timeout=30)
        output, _ = launcher.communicate(timeout=60)
    assert "warning: no step has finished since step" in output
    assert "has finished after" in output


@pytest.mark.slow
def test_a_last_upload_that_takes_its_time_is_no_slow_step(small, tmp_path, hub):
    hub.latency = (1.4, 1.4)
    begun = time.monotonic()
    words = hubs.words(tmp_path / "run", "snapshot.every=1000", "train.max_steps=60")
    result = runs.train(*small, *words, **hub.environment())
    assert result.returncode == 0, result.stderr
    assert time.monotonic() - begun > 2 * timing.SLOW_SECONDS
    assert "hub       me/run has step 60" in result.stdout
    assert "no step has finished since" not in result.stdout
