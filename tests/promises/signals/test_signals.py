"""A run that is told to stop: one snapshot that all agree on, in time, with a code of its own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

import hubs
import runs
from snapshot.disk.folder import snapshot_folders
from stopping import ENDLESS, exit_code, only_snapshot, wait_for_steps

CODES = {signal.SIGTERM: 143, signal.SIGUSR1: 75, signal.SIGINT: 130, signal.SIGHUP: 143}


@pytest.fixture
def words(small, tmp_path) -> list[str]:
    """A run with dropout that would go on for hours, in tmp_path/run.

    Its rate is the same at each step, so that a shorter one takes the same steps.
    """
    constant = "optim.min_learning_rate=0.003"
    return [*small, *ENDLESS, constant, "model.dropout=0.1", f"run.dir={tmp_path / 'run'}"]


def assert_goes_on_bit_by_bit(words: list[str], run_dir: Path, tmp_path: Path, launch) -> None:
    """The stopped run, continued for a few steps, has the bits of one that was not stopped."""
    steps = runs.newest_step(run_dir) + 10
    shorter = [*words, f"train.max_steps={steps}"]  # the last word counts
    whole = tmp_path / "whole"
    first = launch(*shorter, f"run.dir={whole}")
    assert first.returncode == 0, first.stderr
    rest = launch(*shorter)
    assert rest.returncode == 0, rest.stderr
    runs.assert_same_bits(runs.snapshot(whole, steps), runs.snapshot(run_dir, steps))
    assert runs.losses(whole) == runs.losses(run_dir)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(one, marks=[pytest.mark.thorough] * (one != signal.SIGTERM), id=one.name)
        for one in CODES
    ],
)
def test_one_process_stops_with_a_snapshot_and_a_code(words, tmp_path, number):
    run_dir = tmp_path / "run"
    with runs.started(runs.command(*words)) as process:
        wait_for_steps(process, run_dir)
        process.send_signal(number)
        output, errors = process.communicate(timeout=30)
    assert process.returncode == CODES[number], errors
    assert (run_dir / "exit_code").read_text() == f"{CODES[number]}\n"
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    step = runs.newest_step(run_dir)
    assert f"stopped   by {name} at step {step} of 100,000" in output
    assert errors.count("Ctrl-C again ends it at once") == (number == signal.SIGINT)
    only_snapshot(run_dir)
    if number == signal.SIGTERM:
        assert_goes_on_bit_by_bit(words, run_dir, tmp_path, runs.train)
        assert (run_dir / "exit_code").read_text() == "0\n"


@pytest.mark.parametrize(
    ("config", "whom"),
    [
        ("ddp_cpu.yaml", "the launcher"),
        pytest.param("ddp_cpu.yaml", "rank 1", marks=pytest.mark.slow),
        pytest.param("fsdp_cpu.yaml", "the launcher", marks=pytest.mark.slow),
        pytest.param("fsdp_cpu.yaml", "rank 1", marks=pytest.mark.slow),
    ],
)
def test_sigterm_to_launcher_or_worker_stops_all_at_one_step(words, tmp_path, config, whom):
    run_dir = tmp_path / "run"
    # Restarts are left, and must not be used for a run that was told to stop.
    with runs.started(
        runs.launch_command(config, *words, options=("--max_restarts=3",)), forked=False
    ) as launcher:
        wait_for_steps(launcher, run_dir)
        workers = runs.workers(launcher)
        assert len(workers) == 2
        begun = time.monotonic()
        if whom == "the launcher":
            launcher.terminate()
        else:
            workers[1].terminate()
        psutil.wait_procs(list(workers.values()), timeout=25)
        seconds = time.monotonic() - begun
        output, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == 1, errors
    assert (run_dir / "exit_code").read_text() == "143\n"
    assert output.count("stopped   by SIGTERM at step") == 1
    assert output.count("from the beginning") == 1  # nothing was started again
    print(f"{config}, SIGTERM to {whom}: {seconds:.1f} s from the signal to the end")
    assert seconds < 25
    only_snapshot(run_dir)

    def launch(*overrides):
        return runs.launch(config, *overrides)

    assert_goes_on_bit_by_bit(words, run_dir, tmp_path, launch)


def test_a_launcher_that_is_killed_does_not_leave_workers_behind(words, tmp_path):
    run_dir = tmp_path / "run"
    begun = time.monotonic()
    with runs.started(runs.launch_command("ddp_cpu.yaml", *words), forked=False) as launcher:
        wait_for_steps(launcher, run_dir)
        # Within 25 seconds, or the time that this machine takes to start the run, if it is longer.
        limit = max(25, time.monotonic() - begun)
        workers = list(runs.workers(launcher).values())
        assert len(workers) == 2
        launcher.kill()
        _, alive = psutil.wait_procs(workers, timeout=limit)
        assert not alive
    only_snapshot(run_dir)
    assert exit_code(run_dir) == 75  # nobody told the run to stop: it is to be started again


@pytest.mark.slow
def test_a_launcher_ended_by_ctrl_c_does_not_cut_the_snapshot(words, tmp_path):
    run_dir = tmp_path / "run"
    # Steps of seconds: the launcher of one process is gone long before such a one is done.
    long = ["data.block_size=256", "model.n_embd=256", "train.global_batch_size=64"]
    launch = runs.launch_command("cpu.yaml", *words, *long, options=("--mixed_precision=no",))
    with runs.started(launch, session=True, forked=False) as launcher:
        wait_for_steps(launcher, run_dir, steps=2)
        (child,) = psutil.Process(launcher.pid).children()
        os.killpg(launcher.pid, signal.SIGINT)
        launcher.wait(timeout=30)
        psutil.wait_procs([child], timeout=60)
        assert not child.is_running()
    only_snapshot(run_dir)
    assert (run_dir / "exit_code").read_text() == "130\n"


@pytest.mark.thorough
def test_a_hanging_neighbour_cannot_delay_a_stop(words, tmp_path):
    run_dir = tmp_path / "run"
    with runs.started(
        runs.launch_command("ddp_cpu.yaml", *words, "run.grace_seconds=2")
    ) as launcher:
        wait_for_steps(launcher, run_dir)
        workers = runs.workers(launcher)
        workers[1].suspend()  # alive, and silent: what it was asked reaches nobody
        begun = time.monotonic()
        workers[0].terminate()
        psutil.wait_procs([workers[0]], timeout=20)
        seconds = time.monotonic() - begun
        workers[1].kill()
        _, errors = launcher.communicate(timeout=60)
    assert 1.5 < seconds < 10
    assert "stopped by SIGTERM, and its grace time is over" in errors
    assert (run_dir / "exit_code").read_text() == "143\n"
    assert snapshot_folders(run_dir / "snapshots") == []  # none that not all have agreed to


def test_a_second_ctrl_c_leaves_at_once(words, tmp_path):
    run_dir = tmp_path / "run"
    with runs.started(runs.launch_command("ddp_cpu.yaml", *words)) as launcher:
        wait_for_steps(launcher, run_dir)
        workers = runs.workers(launcher)
        workers[1].suspend()
        presses, gone = 0, []
        while not gone and presses < 10:  # two that come together are one to the system
            workers[0].send_signal(signal.SIGINT)
            presses += 1
            gone, _ = psutil.wait_procs([workers[0]], timeout=1)
        assert 2 <= presses < 10
        workers[1].kill()
        _, errors = launcher.communicate(timeout=60)
    assert "stopped by Ctrl-C again" in errors
    assert exit_code(run_dir) == 130


def test_before_the_first_step_a_signal_ends_the_run_at_once(words, tmp_path):
    run_dir = tmp_path / "run"
    with runs.started(runs.command(*words)) as process:
        runs.wait_until((run_dir / ".lock").exists, process)
        process.terminate()
        _, errors = process.communicate(timeout=10)
    assert process.returncode == 143
    assert "stopped by SIGTERM before the first step" in errors or runs.newest_step(run_dir)


@pytest.mark.thorough
def test_a_grace_time_that_the_launcher_does_not_give_is_said(words):
    short = [*words, "train.max_steps=1", "run.grace_seconds=100"]
    result = runs.launch("ddp_cpu.yaml", *short)
    assert "before run.grace_seconds=100. Set TORCH_ELASTIC_SHUTDOWN_TIMEOUT=105" in result.stdout
    result = runs.launch("ddp_cpu.yaml", *short, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="110")
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in result.stdout


@pytest.mark.thorough
def test_the_run_s_own_time_stops_it_to_be_started_again(words, tmp_path):
    run_dir = tmp_path / "run"
    begun = time.monotonic()
    result = runs.launch("ddp_cpu.yaml", *words, "run.max_minutes=0.4", "run.grace_seconds=4")
    seconds = time.monotonic() - begun
    assert result.returncode == 1
    assert (run_dir / "exit_code").read_text() == "75\n"
    assert "stopped   by run.max_minutes=0.4 at step" in result.stdout
    only_snapshot(run_dir)
    print(f"{seconds:.1f} s of 24 s")
    assert seconds < 24 + 4


@pytest.mark.thorough
def test_the_death_of_one_process_is_told_by_the_launcher_alone(words, tmp_path):
    run_dir = tmp_path / "run"
    with runs.started(runs.launch_command("ddp_cpu.yaml", *words)) as launcher:
        wait_for_steps(launcher, run_dir)
        runs.workers(launcher)[1].kill()
        _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert exit_code(run_dir) == 1  # not 143, although the launcher sent SIGTERM to rank 0
    assert "gloo" not in errors  # the echo in rank 0
    assert "exitcode  : -9" in errors


@pytest.mark.parametrize(
    "config", ["ddp_cpu.yaml", pytest.param("fsdp_cpu.yaml", marks=pytest.mark.thorough)]
)
def test_an_error_of_one_process_is_told_once_and_first(words, tmp_path, config):
    result = runs.run(runs.launch_command(config, "fails", *words, script=runs.ALTERED), code=1)
    before_the_launcher, _, _ = result.stderr.partition("ChildFailedError")
    assert before_the_launcher.count("ValueError: only rank 1 knows why") == 1
    assert "gloo" not in result.stderr
    assert exit_code(tmp_path / "run") == 1


@pytest.mark.thorough
def test_a_process_that_a_library_aborts_ends_the_launch_with_a_stack(words, tmp_path):
    """As NCCL's watchdog does: SIGABRT, which no handler in Python survives."""
    result = runs.run(
        runs.launch_command("ddp_cpu.yaml", "aborts", *words, script=runs.ALTERED),
        deadline=90,
        code=1,
    )
    assert "exitcode  : -6" in result.stderr
    assert "Fatal Python error: Aborted" in result.stderr
    assert "in abort_in_a_thread\n" in result.stderr  # where its threads were
    assert not (tmp_path / "run" / "exit_code").exists()  # as after kill -9: started again


@pytest.mark.thorough
def test_what_a_restart_cannot_mend_is_not_started_again(words, tmp_path):
    (tmp_path / "run").mkdir()
    words, options = [*words, 'optim.freeze=["*.h.7.*"]'], ("--max_restarts=5",)
    result = runs.launch("ddp_cpu.yaml", *words, options=options, code=1)
    assert result.stderr.count("error: optim.freeze: '*.h.7.*' matches no parameter") == 1
    assert exit_code(tmp_path / "run") == 2


@pytest.mark.thorough
def test_a_neighbour_that_says_nothing_is_given_up_in_time(words, tmp_path):
    run_dir = tmp_path / "run"
    words = [*words, "run.collective_timeout_seconds=3"]
    with runs.started(runs.launch_command("ddp_cpu.yaml", *words)) as launcher:
        wait_for_steps(launcher, run_dir)
        workers = runs.workers(launcher)
        workers[1].suspend()
        begun = time.monotonic()
        psutil.wait_procs([workers[0]], timeout=30)
        seconds = time.monotonic() - begun
        workers[1].kill()
        _, errors = launcher.communicate(timeout=60)
    assert 2.5 < seconds < 15
    assert "stopped: another process is gone, or cannot be reached" in errors
    assert "Timed out waiting 3000ms" in errors
    assert exit_code(run_dir) == 1
    assert "The same command resumes from the newest snapshot" in errors


@pytest.mark.thorough
@pytest.mark.parametrize(
    "number",
    [pytest.param(one, marks=[pytest.mark.slow] * (one != signal.SIGTERM)) for one in CODES],
    ids=lambda number: number.name,
)
def test_a_signal_does_its_work_while_xet_uploads(words, tmp_path, hub, number):
    """hf_xet, which has threads and signal handling of its own, holds a content in flight."""
    run_dir, hung = tmp_path / "run", hub.fault("xorb", "hang", times=None)
    words = [*words, *hubs.words(run_dir, "snapshot.every=10"), "hub.flush_seconds=2"]
    words += ["hub.timeout_seconds=600"]
    with runs.started(runs.command(*words), **hub.environment()) as process:
        runs.wait_until(lambda: hung.hits, process)
        wait_for_steps(process, run_dir)
        sent = time.monotonic()
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    assert time.monotonic() - sent < 25  # run.grace_seconds; hung requests are left behind
    assert process.returncode == CODES[number], errors
    assert exit_code(run_dir) == CODES[number]
    step = runs.newest_step(run_dir)
    assert f"at step {step} of 100,000" in output
    assert snapshot_folders(run_dir / "snapshots")[0] == runs.snapshot(run_dir, step)
    assert "me/run has nothing yet" in output
    said = [line for line in errors.splitlines() if line.strip()]
    assert all(line.startswith("Ctrl-C: the run finishes this step") for line in said)
    assert len(said) == (number == signal.SIGINT)
    hub.clear_faults()
    runs.train(*words, f"train.max_steps={step + 5}", **hub.environment(), code=0)
    hub.wait_for(lambda: hubs.step_of(hub) >= step)
    hubs.assert_always_whole(hub)


@pytest.mark.thorough
def test_a_second_ctrl_c_leaves_at_once_while_xet_uploads(words, tmp_path, hub):
    run_dir, hung = tmp_path / "run", hub.fault("xorb", "hang", times=None)
    words = [*words, *hubs.words(run_dir, "snapshot.every=10"), "hub.timeout_seconds=600"]
    with runs.started(runs.command(*words), **hub.environment()) as process:
        runs.wait_until(lambda: hung.hits, process)
        process.send_signal(signal.SIGINT)
        for line in process.stdout:
            if "uploading to me/run; at most" in line:
                break
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert time.monotonic() - sent < 5
    assert process.returncode == 130
    assert exit_code(run_dir) == 130
