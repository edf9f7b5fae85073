"""Half an hour of everything at once, a fault every 20 to 40 seconds: in the end the same bits."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

import hubs
import runs
from disks import Tmpfs, mounted
from loopback_hub import LoopbackHub
from snapshot.disk.folder import verify

MINUTES = 30
BETWEEN_SECONDS = (20, 40)
DISK_MEGABYTES = 100


class Soak:
    """A run under a launcher, which is started again whenever it has ended."""

    def __init__(self, words: list[str], said: Path, environment: dict[str, str]) -> None:
        self.words, self.said, self.environment = words, said, environment
        self.starts = 0
        self._stack = contextlib.ExitStack()
        self.launcher: subprocess.Popen | None = None

    def keep_going(self) -> None:
        """Start the run, where it does not run."""
        if self.launcher is None or self.launcher.poll() is not None:
            self._stack.close()
            into = self.said / f"{self.starts}.txt"
            command = runs.launch_command(
                "ddp_cpu.yaml", *self.words, options=("--max_restarts=3",)
            )
            started = runs.started(command, into=into, **self.environment)
            self.launcher = self._stack.enter_context(started)
            self.starts += 1

    def workers(self) -> list[psutil.Process]:
        assert self.launcher is not None
        return list(runs.workers(self.launcher).values())

    def end(self) -> None:
        self._stack.close()


def let(seconds: float, soak: Soak) -> None:
    """Let the run go on for a while."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        soak.keep_going()
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(60 * (2 * MINUTES + 30))
def test_half_an_hour_of_faults_leaves_no_trace(small, tmp_path, hub):
    place = tmp_path / "disk"
    with mounted(place, lambda: Tmpfs(place, megabytes=DISK_MEGABYTES)) as disk:
        soaked_and_compared(small, disk, tmp_path, hub)


def soaked_and_compared(small, disk: Tmpfs, tmp_path: Path, hub: LoopbackHub) -> None:
    """The run, its faults, and what is left of them."""
    run_dir = disk.folder / "run"
    overrides = [
        *small,
        "model.dropout=0.1",
        "optim.min_learning_rate=0.003",  # a rate that does not depend on max_steps
        "train.log_every=10",
        "train.eval_every=1000",
        "train.sample_every=0",
        "snapshot.every=200",
        "run.collective_timeout_seconds=15",
    ]
    words = [*overrides, *hubs.words(run_dir), "train.max_steps=10000000"]
    (tmp_path / "said").mkdir()
    soak = Soak(words, tmp_path / "said", hub.environment())
    chosen, counted = random.Random(2026), Counter()

    def kill_a_worker() -> None:
        for worker in soak.workers()[-1:]:
            worker.kill()

    def terminate_a_worker() -> None:
        for worker in soak.workers()[:1]:
            worker.terminate()

    def suspend_a_worker() -> None:
        for worker in soak.workers()[:1]:
            worker.suspend()
            let(5, soak)
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.resume()

    def to_the_launcher(number: int) -> None:
        if soak.launcher is not None and soak.launcher.poll() is None:
            soak.launcher.send_signal(number)

    def fill_the_disk() -> None:
        disk.fill()
        let(10, soak)
        disk.empty()

    def take_the_hub_down() -> None:
        hub.down()
        let(10, soak)
        hub.up()

    faults = {
        "a worker killed": kill_a_worker,
        "SIGTERM to a worker": terminate_a_worker,
        "a worker stopped for 5 s": suspend_a_worker,
        "SIGTERM to the launcher": lambda: to_the_launcher(signal.SIGTERM),
        "Ctrl-C": lambda: to_the_launcher(signal.SIGINT),
        "the launcher killed": lambda: to_the_launcher(signal.SIGKILL),
        "a full disk for 10 s": fill_the_disk,
        "no Hub for 10 s": take_the_hub_down,
        "500 on a commit": lambda: hub.fault("commit", "status", status=500),
        "a commit whose answer is lost": lambda: hub.fault("commit", "lost-answer"),
    }
    end = time.monotonic() + 60 * MINUTES
    try:
        while time.monotonic() < end:
            let(chosen.uniform(*BETWEEN_SECONDS), soak)
            name = chosen.choice(sorted(faults))
            faults[name]()
            counted[name] += 1
        let(30, soak)  # the last one is over by now
        to_the_launcher(signal.SIGTERM)
        assert soak.launcher is not None
        soak.launcher.wait(timeout=60)
    finally:
        soak.end()
    steps = runs.newest_step(run_dir)
    print(f"{MINUTES} minutes, {sum(counted.values())} faults, {soak.starts} starts, {steps} steps")
    for name, count in sorted(counted.items()):
        print(f"  {count} x {name}")
    verify(runs.snapshot(run_dir, steps))
    undisturbed = tmp_path / "undisturbed"
    command = runs.launch_command(
        "ddp_cpu.yaml", *overrides, f"train.max_steps={steps}", f"run.dir={undisturbed}"
    )
    with runs.started(command, into=tmp_path / "said" / "undisturbed.txt") as process:
        assert process.wait(timeout=60 * (MINUTES + 20)) == 0
    runs.assert_same_bits(runs.snapshot(undisturbed, steps), runs.snapshot(run_dir, steps))
    assert runs.losses(undisturbed) == runs.losses(run_dir)
    assert hubs.step_of(hub) <= steps
    hubs.assert_always_whole(hub)
