"""Promises 1 and 2 over two machines with disks of their own, and a network that fails."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import time
from pathlib import Path

import psutil
import pytest

import hubs
import runs
from hosts import Host, across, hosts
from loopback_hub import LoopbackHub

CONFIGS = [pytest.param("ddp_multinode.yaml", marks=pytest.mark.slow), "fsdp_multinode.yaml"]
GIVEN_UP_SECONDS = 10


class Cluster:
    """Two hosts, each with a disk, and a Hub that both reach."""

    def __init__(self, machines: list[Host], hub: LoopbackHub, config: Path, folder: Path) -> None:
        self.machines, self.hub, self.config, self.folder = machines, hub, config, folder
        self.disks = [folder / "first", folder / "second"]

    def words(self, rank: int, *overrides: str) -> list[str]:
        """The command of a host: the same on each, but for its rank and the place of its disk."""
        disk = self.disks[rank]
        mine = [f"data.cache_dir={disk / 'data'}"]
        return self.machines[rank].launch_command(
            self.config, *overrides, *hubs.words(disk / "run"), *mine
        )

    def start(self, stack: contextlib.ExitStack, *overrides: str) -> list[subprocess.Popen]:
        """The command on both hosts; what is still running ends with the stack."""
        return [
            stack.enter_context(
                host.start(self.words(host.rank, *overrides), **self.hub.environment())
            )
            for host in self.machines
        ]

    def run(self, *overrides: str) -> list[tuple[int, str, str]]:
        """The command on both hosts, to its end: exit code, output and errors of each."""
        with contextlib.ExitStack() as stack:
            started = self.start(stack, *overrides)
            return [finished(process) for process in started]

    @property
    def run_dir(self) -> Path:
        """The first host's."""
        return self.disks[0] / "run"


def finished(process: subprocess.Popen) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=runs.DEADLINE_SECONDS)
    return process.returncode, output, errors


@pytest.fixture(params=CONFIGS)
def cluster(request, tmp_path):
    """Two hosts with one process each, under DDP or FSDP."""
    with hosts(2) as machines, LoopbackHub(machines[0].outside) as hub:
        config = across(machines, request.param, tmp_path)
        yield Cluster(machines, hub, config, tmp_path)


@pytest.mark.slow  # test_slurm has a job on two machines
def test_two_machines_have_the_losses_of_one(cluster, small, tmp_path):
    here = "fsdp_cpu.yaml" if "fsdp" in cluster.config.name else "ddp_cpu.yaml"
    runs.launch(here, *small, f"run.dir={tmp_path / 'one'}", code=0)
    results = cluster.run(*small)
    assert [code for code, _, _ in results] == [0, 0], results
    assert "2 processes" in results[0][1]
    assert [(disk / "run/exit_code").read_text() for disk in cluster.disks] == ["0\n", "0\n"]
    expected, found = runs.losses(tmp_path / "one"), runs.losses(cluster.run_dir)
    worst = max(abs(a - b) / a for a, b in zip(expected, found, strict=True))
    print(f"{cluster.config.name}: largest relative difference {worst:.1e}")
    assert worst < 1e-5


@pytest.mark.slow
def test_a_link_cut_for_five_seconds_only_delays_a_run(cluster, small, tmp_path):
    overrides = [*small, "train.max_steps=300", "train.eval_every=100", "snapshot.every=100"]
    with contextlib.ExitStack() as stack:
        first, second = cluster.start(stack, *overrides)
        runs.wait_until(lambda: runs.newest_step(cluster.run_dir) > 30, first)
        cluster.machines[1].cut()
        time.sleep(5)  # as long as the promise says
        reached = runs.newest_step(cluster.run_dir)
        assert reached < 300
        cluster.machines[1].join()
        joined = time.monotonic()
        runs.wait_until(lambda: runs.newest_step(cluster.run_dir) > reached + 5, first)
        seconds = time.monotonic() - joined
        results = [finished(first), finished(second)]
    assert [code for code, _, _ in results] == [0, 0], results
    assert results[0][1].count("from the beginning") == 1
    assert len(runs.losses(cluster.run_dir)) == 300
    print(f"{cluster.config.name}: goes on {seconds:.1f} s after the link is back")


@pytest.mark.slow
def test_a_link_cut_for_good_ends_both_and_the_hub_has_the_run(cluster, small, tmp_path):
    overrides = [*small, "model.dropout=0.1", "train.max_steps=300", "train.eval_every=100"]
    bound = f"run.collective_timeout_seconds={GIVEN_UP_SECONDS}"
    with contextlib.ExitStack() as stack:
        processes = cluster.start(stack, *overrides, bound)
        runs.wait_until(lambda: hubs.step_of(cluster.hub) >= 30, processes[0])
        cluster.machines[1].cut()
        begun = time.monotonic()
        results = [finished(process) for process in processes]
        seconds = time.monotonic() - begun
    for code, _, errors in results:
        assert code == 1
        assert "stopped: another process is gone, or cannot be reached: " in errors
        assert "The same command resumes from the newest snapshot;" in errors
    print(f"{cluster.config.name}: both have ended {seconds:.1f} s after the cut")
    assert seconds < GIVEN_UP_SECONDS + 30
    assert [(disk / "run/exit_code").read_text() for disk in cluster.disks] == ["1\n", "1\n"]
    cluster.machines[1].join()
    cluster.disks = [tmp_path / "new disk", tmp_path / "another"]
    stored = hubs.step_of(cluster.hub)
    results = cluster.run(*overrides)
    assert [code for code, _, _ in results] == [0, 0], results
    assert f"step-{stored:08d}" in results[0][1]
    whole = tmp_path / "whole"
    here = "fsdp_cpu.yaml" if "fsdp" in cluster.config.name else "ddp_cpu.yaml"
    assert runs.launch(here, *overrides, f"run.dir={whole}").returncode == 0
    runs.assert_same_bits(runs.snapshot(whole, 300), runs.snapshot(cluster.run_dir, 300))
    hubs.assert_always_whole(cluster.hub)


def the_loop_of_the_readme(words: list[str], run_dir: Path) -> list[str]:
    """What docs/ has a machine do, with this test's words for the launch and its run."""
    page = (runs.ROOT / "docs" / "several-machines.md").read_text()
    (loop,) = (block for block in page.split("```") if block.lstrip().startswith("trap "))
    command = re.search(r"accelerate launch .*?(?=; do)", loop)
    assert command is not None
    loop = loop.replace(command[0], shlex.join(words))
    assert "out/run/exit_code" in loop
    return ["bash", "-c", loop.replace("out/run", str(run_dir))]


def looping(cluster: Cluster, host: Host, into: Path, *overrides: str):
    """The loop of docs/several-machines.md on a host of the cluster."""
    run_dir = cluster.disks[host.rank] / "run"
    words = the_loop_of_the_readme(cluster.words(host.rank, *overrides), run_dir)
    return host.start(words, into=into, **cluster.hub.environment())


def kill_on(host: Host, what: str) -> None:
    """kill -9 for the launcher, or the worker, on a host."""
    for pid in host.processes():
        process = psutil.Process(pid)
        is_worker = "RANK" in process.environ()
        is_launcher = "accelerate.commands.launch" in process.cmdline() and not is_worker
        if (what == "worker" and is_worker) or (what == "launcher" and is_launcher):
            process.kill()
            return
    raise AssertionError(f"no {what} on {host.name}")


OUTAGE_SECONDS = 30


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cluster", ["ddp_multinode.yaml"], indirect=True)
def test_the_loop_of_the_readme_ends_done_despite_failures(cluster, small, tmp_path):
    overrides = [
        *small,
        "model.dropout=0.1",
        "train.max_steps=900",
        "train.eval_every=300",
        "snapshot.every=20",
        "run.collective_timeout_seconds=10",
    ]
    first, second = cluster.machines
    said = [tmp_path / "first said", tmp_path / "second said", tmp_path / "its successor said"]

    def goes_on(loop, attempts: int) -> None:
        begun = "machine   2 processes"
        runs.wait_until(lambda: said[0].read_text().count(begun) == attempts, loop, 240)
        reached = hubs.step_of(cluster.hub)
        runs.wait_until(lambda: hubs.step_of(cluster.hub) >= reached + 40, loop, 240)

    def start(host: Host, into: Path):
        return looping(cluster, host, into, *overrides)

    with start(second, said[1]) as other:
        with start(first, said[0]) as one:
            goes_on(one, attempts=1)
            kill_on(second, "worker")
            goes_on(one, attempts=2)
            kill_on(first, "launcher")
            goes_on(one, attempts=3)
            first.kill()
            one.wait(timeout=runs.DEADLINE_SECONDS)
        cluster.disks[0] = tmp_path / "empty_disk"
        first.boot()
        first.lose()
        lost = time.monotonic()
        with start(first, said[2]) as successor:
            runs.wait_until(
                lambda: (
                    "it is unknown whether me/run holds" in said[2].read_text()
                    and time.monotonic() - lost > OUTAGE_SECONDS
                ),
                successor,
                240,
            )
            first.find()
            assert successor.wait(timeout=runs.DEADLINE_SECONDS) == 0, said[2].read_text()
        assert other.wait(timeout=runs.DEADLINE_SECONDS) == 0, said[1].read_text()
    whole = tmp_path / "whole"
    assert runs.launch("ddp_cpu.yaml", *overrides, f"run.dir={whole}").returncode == 0
    runs.assert_same_bits(runs.snapshot(whole, 900), runs.snapshot(cluster.run_dir, 900))
    assert runs.losses_from(cluster.run_dir, 880) == runs.losses_from(whole, 880)


@pytest.mark.thorough
def test_the_loop_of_the_readme_ends_at_a_mistake(tmp_path):
    run_dir = tmp_path / "run"
    words = runs.launch_command("cpu.yaml", f"run.dir={run_dir}", "train.max_stepz=5")
    result = runs.run(the_loop_of_the_readme(words, run_dir), deadline=60, code=2)
    assert result.stderr.count("There is no key 'train.max_stepz'") == 1
